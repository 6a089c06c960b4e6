"""List the sections of the configuration file: keys, accepted values and defaults."""

from __future__ import annotations

from config.reference.tables import Table
from scheduling.configuration.file.notation import REQUIRED
from scheduling.configuration.file.section import Field, Section
from scheduling.configuration.file.sections import sections


def section_tables() -> dict[str, Table]:
    return {name: Table(("key", "takes", "default"), _field_rows(section)) for name, section in sections().items()}


def _field_rows(section: Section) -> list[list[str]]:
    names = {each.model: name for name, each in sections().items()}
    return [
        [
            f"`{field.path}`",
            f"a key of `{names[field.related]}`" if field.related else field.notation.description,
            describe_default(field),
        ]
        for field in section.fields
    ]


def describe_default(field: Field) -> str:
    value = field.default
    if value is REQUIRED:
        return "required"
    if value is None or value == "" or value == [] or value == {}:
        return "none"
    written = field.notation.write(value)
    return f"`{str(written).lower() if isinstance(written, bool) else written}`"
