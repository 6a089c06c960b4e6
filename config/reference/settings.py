"""`config.environment` as tables: the accepted values and the default of each variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from config.environment import ROOT, Environment
from config.reference.tables import Table

#: Groups by prefix of the variable; the first match applies, and the last group takes the rest.
GROUPS = {
    "servers": (
        "database_",
        "redis_",
        "celery_",
        "aftertouch_sentinel",
        "aftertouch_rabbitmq",
        "aftertouch_prepare",
        "aftertouch_replica_",
    ),
    "django": ("django_",),
    "rpa": ("aftertouch_rpa_", "rpa_"),
    "chats": ("aftertouch_silence_", "aftertouch_conversation_", "aftertouch_gateway_", "aftertouch_sessions_"),
    "email": ("aftertouch_email_",),
    "aftertouch": ("",),
}
#: By format or type in the JSON schema.
KINDS = {
    "boolean": "`true` or `false`",
    "integer": "a whole number",
    "number": "a number",
    "duration": "a duration",
    "path": "a folder",
    "password": "a secret",
    "string": "text",
    "object": "pairs `value=role`, separated by commas",
}
#: By attribute of the field's constraints. The JSON schema leaves out those of durations.
BOUNDS = {"ge": "from `{}`", "gt": "above `{}`", "le": "up to `{}`", "max_length": "of at most {} characters"}


def setting_tables() -> dict[str, Table]:
    rows: dict[str, list[list[str]]] = {group: [] for group in GROUPS}
    for name, schema in Environment.model_json_schema()["properties"].items():
        group = next(group for group, starts in GROUPS.items() if name.startswith(starts))
        takes = _accepted_values(schema, Environment.model_fields[name])
        rows[group].append([f"`{name.upper()}`", takes, _default(schema)])
    return {group: Table(("variable", "takes", "default"), found) for group, found in rows.items()}


def _accepted_values(schema: dict[str, Any], field: FieldInfo) -> str:
    if "pattern" in schema:
        return ", ".join(f"`{word}`" for word in schema["pattern"].strip("^$()").split("|"))
    schema = schema.get("anyOf", [schema])[0]
    if schema["type"] == "array":
        return "comma-separated secrets" if "format" in schema["items"] else "a comma-separated list"
    limits = [(BOUNDS[name], getattr(each, name)) for each in field.metadata for name in BOUNDS if hasattr(each, name)]
    return " ".join([KINDS[schema.get("format", schema["type"])], *(text.format(_format(of)) for text, of in limits)])


def _default(schema: dict[str, Any]) -> str:
    if "default" not in schema:
        return "the host's name"
    if schema.get("format") == "path":
        return f"`{Path(schema['default']).relative_to(ROOT)}` in the checkout"
    return f"`{_format(schema['default'])}`" if schema["default"] not in (None, [], {}, "") else "none"


def _format(value: Any) -> str:
    """Format a value as the variable accepts it; a duration in ISO 8601, `PT30S`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(to_jsonable_python(value))
