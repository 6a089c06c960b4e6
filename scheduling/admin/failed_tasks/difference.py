"""Show what an operator edited before a failed task was published again, with personal and secret values hidden."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.template.loader import render_to_string
from django.utils.safestring import SafeString

from scheduling.models import FailedTask
from scheduling.redaction import redact
from scheduling.strict_text import is_same_json

MOST_SHOWN = 50  #: changed values
ABSENT = object()


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """One value of a payload that was edited, by its path. An absent value is None."""

    path: str
    before: str | None
    after: str | None


def list_changed_values(difference: Any) -> list[ChangedValue]:
    """Return the edited values of a stored difference, masked by name and content, at most `MOST_SHOWN`."""
    if not difference:
        return []
    plain = [dict(_iterate_values(difference.get(side) or {})) for side in ("before", "after")]
    shown = [dict(_iterate_values(redact(difference.get(side) or {}))) for side in ("before", "after")]
    before, after = plain
    kept = {path for path in before.keys() & after.keys() if is_same_json(before[path], after[path])}
    paths = [path for path in {**before, **after} if path not in kept]
    return [
        ChangedValue(path, *(_format_value(side.get(path, ABSENT)) for side in shown)) for path in paths[:MOST_SHOWN]
    ]


def render_difference(row: FailedTask | None) -> SafeString:
    """Return the HTML of the difference with its author; empty if the task was not edited."""
    values = list_changed_values(row.difference) if row else []
    return render_to_string("ops/difference.html", {"row": row, "values": values}) if values else SafeString("")


def _iterate_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values below an object by path. A list counts as one value."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _iterate_values(below, f"{path}.{name}" if path else str(name))
    elif path:
        yield path, value


def _format_value(value: Any) -> str | None:
    if value is ABSENT:
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
