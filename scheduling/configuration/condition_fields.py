"""Know the fields that conditions may name: those of the latest events of a type, of customers, and of event types.

Samples are bounded. Where a sample is empty, every name is accepted: nothing is known yet.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.models import EventType, Node
from scheduling.policy.matrix import END_FIELDS, TOUCH_TYPES
from scheduling.policy.node_conditions import (
    ATTRIBUTE,
    COUNT_PREFIX,
    COUNT_SUFFIX,
    DATA,
    DEEPEST_PATH,
    PLAIN_FIELDS,
    counted_type,
)
from scheduling.redaction import redact_text

MOST_READ = 5_000  #: latest profiles
MOST_SAMPLED = 300  #: latest events of one type
MOST_PATHS = 1_000
ITEM = "0"  #: stands for every place in a list, and for a member whose name is a number

#: Fields by the place that names them: `when.all[0].field`.
PlacedFields = Mapping[str, str]


def conditions_in(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields in a node's valid conditions and variants, by their place."""
    found = dict(_list_places(values.get("when"), "when"))
    for number, variant in enumerate(values.get("variants") or ()):
        found |= _list_places(variant["when"], f"variants[{number}].when")
    return found


def _list_places(part: Any, path: str) -> Iterator[tuple[str, str]]:
    for join, parts in (part or {}).items():
        for place, each in enumerate(parts):
            inner = f"{path}.{join}[{place}]"
            if "field" in each:
                yield f"{inner}.field", each["field"]
            else:
                yield from _list_places(each, inner)


class FieldCatalogue:
    """The known fields, read at most once each."""

    def __init__(self) -> None:
        self._paths: dict[str, set[str]] = {}

    def find_unknown(
        self, fields: PlacedFields, trigger: str, used: PlacedFields | None = None
    ) -> Iterator[tuple[str, str]]:
        """Yield place and problem of each unknown field, except those that the stored node already uses."""
        accepted = set((used or {}).values())
        for place, field in fields.items():
            if field not in accepted and (problem := self._find_problem(field, trigger)):
                yield place, problem

    def _find_problem(self, field: str, trigger: str) -> str:
        if field.startswith(f"{DATA}origin.") and trigger in TOUCH_TYPES:
            return ""  # the data of any first event
        if field.startswith(DATA):
            known = self.event_paths(trigger)
            # A name of digits may be that of a mapping's member, too.
            return (
                ""
                if _generalize(field) in map(_generalize, known)
                else _unknown(field, known, _("none of the latest events of type “%(type)s” has it", type=trigger))
            )
        if counted := counted_type(field):
            return "" if counted == trigger or field in self.counted_types else _unknown(
                field, self.counted_types, _("no event of this type is known")
            )  # fmt: skip
        if field.startswith(ATTRIBUTE):
            return "" if field in self.attributes else _unknown(field, self.attributes, _("no customer has it"))
        return ""

    def suggest(self, trigger: str) -> list[str]:
        """Return the fields to offer for a node with this trigger."""
        return [
            *PLAIN_FIELDS,
            *sorted(self.event_paths(trigger)),
            *sorted(self.attributes),
            *sorted(self.counted_types),
        ]

    @cached_property
    def attributes(self) -> set[str]:
        return {f"{ATTRIBUTE}{row[0]}" for row in sql.rows(_ATTRIBUTES, {"most": MOST_READ})}

    @cached_property
    def counted_types(self) -> set[str]:
        types = {*EventType.objects.values_list("key", flat=True), *Node.objects.values_list("trigger", flat=True)}
        return {f"{COUNT_PREFIX}{kind}{COUNT_SUFFIX}" for kind in types}

    def event_paths(self, trigger: str) -> set[str]:
        """Return the paths of the data in the latest events of this type, without those that name a person's number."""
        if trigger not in self._paths:
            parameters = {"type": trigger, "most": MOST_SAMPLED}
            found = {f"{DATA}{name}" for name in END_FIELDS} if trigger in TOUCH_TYPES else set()
            for (data,) in sql.rows(_SAMPLE, parameters):
                found.update(_list_paths(data, DATA.rstrip("."), DEEPEST_PATH))
                if len(found) > MOST_PATHS:
                    break
            self._paths[trigger] = {path for path in found if redact_text(path) == path}
        return self._paths[trigger]


def _generalize(path: str) -> str:
    """Return a path with `ITEM` for each number."""
    return ".".join(ITEM if name.isdigit() else name for name in path.split("."))


def _list_paths(data: Any, path: str, depth: int) -> Iterator[str]:
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = ((ITEM, each) for each in data[:20])
    for name, inner in items if depth else ():
        below = f"{path}.{ITEM if name.isdigit() else name}"
        yield below
        yield from _list_paths(inner, below, depth - 1)


def _unknown(field: str, known: set[str], reason: str) -> str:
    """Return the problem with suggestions; "" while nothing is known."""
    if not known:
        return ""
    close = difflib.get_close_matches(field, sorted(known), n=3) or sorted(known)[:3]
    return _(
        "“%(name)s” is not known: %(why)s; did you mean %(known)s?", name=field, why=reason, known=", ".join(close)
    )


_SAMPLE = """
SELECT data FROM (
    SELECT data FROM scheduling_event WHERE type = %(type)s ORDER BY id DESC LIMIT %(most)s
) AS latest WHERE pg_column_size(data) < 20000
"""

_ATTRIBUTES = """
SELECT DISTINCT jsonb_object_keys(attributes) FROM (
    SELECT attributes FROM scheduling_customerprofile ORDER BY customer_id DESC LIMIT %(most)s
) AS latest WHERE jsonb_typeof(attributes) = 'object'
"""
