"""`config.environment` as tables: the accepted values and the default of each variable."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from config.environment import ROOT, Environment
from config.reference.tables import Table

#: Groups by prefix of the variable; the first match applies, and the last group takes the rest.
GROUPS = {
    "servers": ("database_", "redis_", "celery_", "aftertouch_sentinel", "aftertouch_rabbitmq", "aftertouch_prepare"),
    "django": ("django_",),
    "rpa": ("aftertouch_rpa_", "rpa_"),
    "chats": ("aftertouch_silence_", "aftertouch_conversation_", "aftertouch_gateway_"),
    "email": ("aftertouch_email_",),
    "aftertouch": ("",),
}


def setting_tables() -> dict[str, Table]:
    rows: dict[str, list[list[str]]] = {group: [] for group in GROUPS}
    for name, field in Environment.model_fields.items():
        group = next(group for group, starts in GROUPS.items() if name.startswith(starts))
        rows[group].append([f"`{name.upper()}`", accepted_setting_values(field), setting_default(field)])
    return {group: Table(("variable", "takes", "default"), found) for group, found in rows.items()}


def accepted_setting_values(field: FieldInfo) -> str:
    pattern = next((found for each in field.metadata if (found := getattr(each, "pattern", None))), None)
    if pattern:
        return ", ".join(f"`{word}`" for word in pattern.strip("^$()").split("|"))
    return " ".join([_describe_annotation(field.annotation), *_describe_bounds(field)])


def setting_default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "the host's name"
    if isinstance(value, Path):
        return f"`{value.relative_to(ROOT)}` in the checkout"
    if value is None or value == [] or str(value) == "":
        return "none"
    return f"`{_format_value(value)}`"


def _describe_annotation(annotation: Any) -> str:
    named = {
        bool: "`true` or `false`",
        int: "a whole number",
        float: "a number",
        timedelta: "a duration",
        Path: "a folder",
        str: "text",
    }
    for kind in (annotation, *get_args(annotation)):  # for an optional type, the first of the two
        if kind in named and get_origin(annotation) is not list:
            return named[kind]
    if "list" in str(annotation):
        return "comma-separated secrets" if "Secret" in str(annotation) else "a comma-separated list"
    return "a secret"


def _describe_bounds(field: FieldInfo) -> list[str]:
    words = []
    for each in field.metadata:
        if isinstance(each, Ge):
            words.append(f"from `{_format_value(each.ge)}`")
        elif isinstance(each, Gt):
            words.append(f"above `{_format_value(each.gt)}`")
        elif isinstance(each, Le):
            words.append(f"up to `{_format_value(each.le)}`")
        elif isinstance(each, MaxLen):
            words.append(f"of at most {each.max_length} characters")
    return words


def _format_value(value: Any) -> str:
    """Format a value as the variable accepts it; a duration in ISO 8601, `PT30S`."""
    if isinstance(value, float):
        return f"{value:g}" if value < 1e6 else f"{int(value)}"
    return str(to_jsonable_python(value)).lower() if isinstance(value, bool) else str(to_jsonable_python(value))
