"""Generate the tables of `docs/reference/` from the code: `python -m config.reference`.

Names, accepted values and defaults come from the code. The last column is written by hand and kept. `tests/docs` fails
if a table is outdated or a description is missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from config.environment import ROOT, Environment

if TYPE_CHECKING:
    from scheduling.configuration.file.section import Field

FOLDER = ROOT / "docs" / "reference"

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


#: A table of a page between `<!-- table: name -->` and `<!-- end -->`.
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_CELLS = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class Table:
    head: Sequence[str]  #: columns from the code
    rows: Sequence[Sequence[str]]


def rewrite_tables(page: str, tables: Mapping[str, Table]) -> str:
    """Return the page with current tables. Raises `LookupError` if a place has no table or a table no place."""
    names = [name for _, name, _, _ in _TABLE.findall(page)]
    if sorted(names) != sorted(tables):
        raise LookupError(f"the page has places for {sorted(names)}, the code has {sorted(tables)}")
    return _TABLE.sub(lambda found: found[1] + _written(tables[found[2]], _descriptions(found[3])) + found[4], page)


def _descriptions(body: str) -> dict[str, str]:
    """Return the last column by the first column."""
    lines = [line for line in body.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in _CELLS.split(line)[1:-1]] for line in lines[2:]]
    return {row[0]: row[-1] for row in rows}


def _written(table: Table, descriptions: Mapping[str, str]) -> str:
    lines = [[*table.head, "what it is for"], ["---"] * (len(table.head) + 1)]
    lines += [[*row, descriptions.get(row[0], "")] for row in table.rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


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


def section_tables() -> dict[str, Table]:
    """Return the sections of the configuration file: keys, accepted values and defaults. Needs Django."""
    from scheduling.configuration.file.sections import sections

    names = {section.model: name for name, section in sections().items()}

    def row(field: Field) -> list[str]:
        takes = f"a key of `{names[field.related]}`" if field.related else field.notation.description
        return [f"`{field.path}`", takes, _describe_default(field)]

    return {
        name: Table(("key", "takes", "default"), [row(field) for field in section.fields])
        for name, section in sections().items()
    }


def _describe_default(field: Field) -> str:
    from scheduling.configuration.file.notation import REQUIRED

    value = field.default
    if value is REQUIRED:
        return "required"
    if value is None or value == "" or value == [] or value == {}:
        return "none"
    written = field.notation.write(value)
    return f"`{str(written).lower() if isinstance(written, bool) else written}`"


def api_tables() -> dict[str, Table]:
    """Return the requests of the HTTP API with the scope that each requires. Needs Django."""
    import config.urls  # noqa: F401  (adds the routers of other apps)
    from scheduling.api.app import api

    rows = []
    for prefix, router in api._routers:
        for path, view in router.path_operations.items():
            for operation in filter(lambda each: each.include_in_schema, view.operations):
                authenticators: Any = operation.auth_callbacks or [router.auth]
                scopes = " or ".join(f"`{scope}`" for each in authenticators for scope in each.scopes)
                address = f"/api/v1{prefix}{path.replace('{path:', '{')}"
                rows += [[f"`{method} {address}`", scopes] for method in operation.methods]
    return {"requests": Table(("request", "scope"), rows)}


def build_pages() -> dict[Path, str]:
    """Return each page with current tables. Needs Django."""
    tables = {"settings.md": setting_tables(), "config-file.md": section_tables(), "api.md": api_tables()}
    return {FOLDER / name: rewrite_tables((FOLDER / name).read_text("utf-8"), each) for name, each in tables.items()}


def main() -> None:
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")
    django.setup()
    for path, text in build_pages().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
