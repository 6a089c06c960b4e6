"""List the sections of the configuration file: keys, accepted values and defaults."""

from __future__ import annotations

from typing import Any

from config.reference.tables import Table
from scheduling.configuration.file.base import Section
from scheduling.configuration.file.schema import (
    REQUIRED,
    Choice,
    Clock,
    Duration,
    Field,
    Flag,
    ListOf,
    MapOf,
    Named,
    Number,
    Text,
    Whole,
)
from scheduling.configuration.file.sections import sections


def section_tables() -> dict[str, Table]:
    return {name: Table(("key", "takes", "default"), _field_rows(section)) for name, section in sections().items()}


def _field_rows(section: Section) -> list[list[str]]:
    fields = [*section.fields, *getattr(section, "text_fields", ())]
    if by := getattr(section, "by", None):
        fields.append(by)
    return [[f"`{field.path}`", accepted_field_values(field), field_default(field)] for field in fields]


def accepted_field_values(field: Field) -> str:
    return f"a key of `{field.refers}`" if field.refers else _describe_kind(field.value)


def field_default(field: Field) -> str:
    value = field.default
    if value is REQUIRED:
        return "required"
    if value is None or value == "" or value == [] or value == {}:
        return "none"
    written = field.written(value)
    return f"`{str(written).lower() if isinstance(written, bool) else written}`"


def _describe_kind(value: Any) -> str:  # noqa: PLR0911 (a case for each kind of field)
    match value:
        case Text(longest=longest):
            return f"text of up to {longest:,} characters"
        case Choice(options=options):
            return ", ".join(f"`{option}`" for option in options)
        case Named(names=names):
            return ", ".join(f"`{each}`" for each in names)
        case ListOf(each=each):
            return f"a list: {_describe_kind(each)}"
        case MapOf(each=each):
            return f"a mapping to: {_describe_kind(each)}"
        case Flag():
            return "`true` or `false`"
        case Whole():
            return "a whole number"
        case Number():
            return "a number"
        case Clock():
            return 'a time of day like `"22:00"`'
        case Duration():
            return "a duration"
        case _:
            return _describe_named_kind(type(value).__name__)


def _describe_named_kind(kind: str) -> str:
    """Describe values of other apps and of single sections."""
    return {
        "Seconds": "a duration",
        "OwnDelayRules": "a mapping like `delay_rules`",
        "CanaryGuard": "a mapping: `steps`, `time`, `touches`, `complaints`, `failures`",
        "Instant": 'an instant with its offset, like `"2026-11-11T00:00:00+08:00"`',
        "Anything": "a mapping",
        "SendWindows": "a send window, or a list of them",
        "ConditionTree": "a condition: `all` or `any` with a list of rows",
        "VariantList": "a list of at most 10: `key`, `when` and `template`",
    }.get(kind, kind.lower())
