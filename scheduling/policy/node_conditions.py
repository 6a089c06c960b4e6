"""Judge the conditions of nodes: rows of field, operator and value, joined by `all` or `any`, with one level of groups.

Stored form: `{"all": [{"field": "event.data.amount", "op": "gte", "value": 500}, {"any": [row, row]}]}`.
Pure. `compile_condition` runs once per configuration snapshot. One judgement reads at most `MOST_ROWS` fields.

Conditions like “the first order” count a customer's earlier events of a type. Earlier are the events that were stored
before this one. Those count that occurred within `COUNTED_SPAN` before it, or later. The count of an event therefore
never changes while its touches wait. Counts end at `MOST_EARLIER`, so that a customer with many events costs no more.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from datetime import UTC, datetime, timedelta
from math import isfinite
from operator import attrgetter
from typing import Any, Final, NamedTuple

from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, is_number

MOST_ROWS = 20  #: of one condition, those in groups included
MOST_VARIANTS = 10  #: per node
MOST_VALUES = 50  #: in the list of one row
LONGEST_VALUE = 256
LONGEST_FIELD = 200
DEEPEST_PATH = 8
JOINS = ("all", "any")
#: The fields with a name of their own. The others have a prefix, or are counts of events.
PLAIN_FIELDS = ("event.type", "event.source", "chat_id", "customer.level", "customer.locale", "customer.tags")
DATA, ATTRIBUTE = "event.data.", "customer.attributes."  #: prefixes
COUNT_PREFIX, COUNT_SUFFIX = "customer.events.", ".count"  #: around an event type, which may have dots

_ABSENT: Final = object()
_DECIMAL = re.compile(r"[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?")


class Facts(NamedTuple):
    """What a condition is judged by. `earlier` counts the customer's events before this one (`earlier_events`)."""

    data: Mapping[str, Any]
    chat_id: str
    level: str
    tags: Sequence[str] = ()
    attributes: Mapping[str, Any] = {}  #: an instant is a `datetime`
    earlier: Mapping[str, int] = {}  #: by event type, up to `MOST_EARLIER`
    locale: str = ""
    event_type: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class ConditionRow:
    field: str
    op: str
    value: Any  #: a list is held as a tuple
    read: Callable[[Facts], Any] = attribute(compare=False, repr=False)  #: of the field

    def holds(self, facts: Facts) -> bool:
        actual = self.read(facts)
        if actual is _ABSENT:
            return self.op in HOLDING_WHEN_ABSENT
        return _OPERATORS[self.op](actual, self.value)

    def failing(self, facts: Facts) -> ConditionRow | None:
        return None if self.holds(facts) else self

    def __str__(self) -> str:
        value = ", ".join(map(str, self.value)) if isinstance(self.value, tuple) else self.value
        return f"{self.field} {self.op}" + ("" if value is None else f" {value}")

    def show_observed(self, facts: Facts) -> str:
        """Return the field's value for a verdict. Texts of events and attributes may be personal and are left out."""
        actual = self.read(facts)
        if actual is _ABSENT:
            return "absent"
        if self.field in PLAIN_FIELDS:
            return ", ".join(actual) if isinstance(actual, (list, tuple)) else str(actual)
        return str(actual) if isinstance(actual, (bool, int, float)) else "other"


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """A compiled condition, or a group in one."""

    join: str
    parts: tuple[ConditionRow | NodeCondition, ...]

    def holds(self, facts: Facts) -> bool:
        return (all if self.join == "all" else any)(part.holds(facts) for part in self.parts)

    def failing(self, facts: Facts) -> ConditionRow | NodeCondition | None:
        """Return the part because of which the condition does not hold, or None."""
        if self.holds(facts):
            return None
        if self.join == "any":
            return self if len(self.parts) > 1 else self.parts[0].failing(facts)
        return next(part.failing(facts) for part in self.parts if not part.holds(facts))

    def rows(self) -> Iterator[ConditionRow]:
        for part in self.parts:
            if isinstance(part, NodeCondition):
                yield from part.rows()
            else:
                yield part

    @property
    def counted(self) -> frozenset[str]:
        """Return the event types whose earlier events the condition counts."""
        return frozenset(filter(None, (counted_type(row.field) for row in self.rows())))

    @property
    def reads_profile(self) -> bool:
        """Return whether the condition reads tags or attributes of the customer."""
        return any(row.field.startswith(("customer.tags", ATTRIBUTE)) for row in self.rows())

    def __str__(self) -> str:
        return f"{self.join}({'; '.join(map(str, self.parts))})"

    def show_observed(self, facts: Facts) -> str:
        return "; ".join(f"{row.field}: {row.show_observed(facts)}" for row in self.rows())


def counted_type(name: str) -> str:
    """Return the event type whose earlier events a field counts, or ""."""
    if not name.startswith(COUNT_PREFIX) or not name.endswith(COUNT_SUFFIX):
        return ""
    return name[len(COUNT_PREFIX) : -len(COUNT_SUFFIX)]


def compile_reader(name: str) -> Callable[[Facts], Any]:
    """Return a function for the value of a field, or `_ABSENT`. Empty texts and an empty list of tags are absent."""
    if name in _PLAIN_READERS:
        plain = _PLAIN_READERS[name]
        return lambda facts: plain(facts) or _ABSENT
    if name.startswith(DATA):
        path = name.removeprefix(DATA).split(".")
        return lambda facts: _follow_path(facts.data, path)
    if counted := counted_type(name):
        return lambda facts: facts.earlier.get(counted, 0)
    attribute = name.removeprefix(ATTRIBUTE)
    return lambda facts: facts.attributes.get(attribute, _ABSENT)


_PLAIN_READERS: Mapping[str, Callable[[Facts], Any]] = {
    "event.type": attrgetter("event_type"),
    "event.source": attrgetter("source"),
    "chat_id": attrgetter("chat_id"),
    "customer.level": attrgetter("level"),
    "customer.locale": attrgetter("locale"),
    "customer.tags": attrgetter("tags"),
}


def _follow_path(data: Any, path: Sequence[str]) -> Any:
    for name in path:
        if isinstance(data, Mapping) and name in data:
            data = data[name]
        elif isinstance(data, list) and name.isascii() and name.isdigit() and int(name) < len(data):
            data = data[int(name)]
        else:
            return _ABSENT
    return _ABSENT if data is None else data


def _as_number(value: Any) -> float | None:
    """Return a number, also one that is written as text, as many senders write amounts."""
    if isinstance(value, str):
        if len(value) > 62 or not _DECIMAL.fullmatch(value):
            return None
        return float(value) if "." in value else int(value)  # ids of 16 digits and more differ as integers only
    return value if is_number(value) and isfinite(value) else None


def _as_instant(value: Any) -> datetime | None:
    """Return the instant of a time or an ISO 8601 text. Without an offset it is UTC."""
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str) or not 10 <= len(value) <= 40:
        return None
    try:
        found = datetime.fromisoformat(value)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _equals(actual: Any, wanted: Any) -> bool:
    """Compare. A number equals its text; yes and no equal only themselves and the texts `true` and `false`."""
    if isinstance(actual, bool) or isinstance(wanted, bool):
        return str(actual).lower() == str(wanted).lower()
    if isinstance(actual, datetime):
        return actual == _as_instant(wanted)
    if isinstance(actual, str) and isinstance(wanted, str):
        return actual == wanted
    number = _as_number(actual)
    return number is not None and number == _as_number(wanted)


def _contains(actual: Any, wanted: Any) -> bool:
    if isinstance(actual, (list, tuple)):
        return any(_equals(each, wanted) for each in actual)
    return isinstance(actual, str) and str(wanted) in actual


def _compare(actual: Any, wanted: Any, accept: Callable[[Any, Any], bool]) -> bool:
    for read in (_as_number, _as_instant):
        first, second = read(actual), read(wanted)
        if first is not None and second is not None:
            return accept(first, second)
    return False


_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": _equals,
    "ne": lambda actual, wanted: not _equals(actual, wanted),
    "gt": lambda actual, wanted: _compare(actual, wanted, lambda a, b: a > b),
    "gte": lambda actual, wanted: _compare(actual, wanted, lambda a, b: a >= b),
    "lt": lambda actual, wanted: _compare(actual, wanted, lambda a, b: a < b),
    "lte": lambda actual, wanted: _compare(actual, wanted, lambda a, b: a <= b),
    "in": lambda actual, wanted: any(_equals(actual, each) for each in wanted),
    "not_in": lambda actual, wanted: not any(_equals(actual, each) for each in wanted),
    "contains": _contains,
    "not_contains": lambda actual, wanted: not _contains(actual, wanted),
    "starts_with": lambda actual, wanted: isinstance(actual, str) and actual.startswith(str(wanted)),
    "exists": lambda actual, wanted: True,
    "absent": lambda actual, wanted: False,
}
OPERATORS = tuple(_OPERATORS)
HOLDING_WHEN_ABSENT = frozenset({"ne", "not_in", "not_contains", "absent"})
WITHOUT_VALUE = frozenset({"exists", "absent"})
WITH_LIST = frozenset({"in", "not_in"})
COMPARING = frozenset({"gt", "gte", "lt", "lte"})
_FOR_TAGS = frozenset({"contains", "not_contains", "exists", "absent"})
_FOR_COUNTS = COMPARING | {"eq", "ne"}


def compile_condition(stored: Mapping[str, Any] | None) -> NodeCondition | None:
    """Return a stored, valid condition in its compiled form; None if there are no rows."""
    if not stored:
        return None
    (join, parts), *_others = stored.items()
    compiled = tuple(_compile_part(part) for part in parts)
    return NodeCondition(join, compiled) if compiled else None


def _compile_part(part: Mapping[str, Any]) -> ConditionRow | NodeCondition:
    if "field" not in part:
        (join, rows), *_others = part.items()
        return NodeCondition(join, tuple(_compile_part(row) for row in rows))
    value = part.get("value")
    held = tuple(value) if isinstance(value, list) else value
    return ConditionRow(part["field"], part["op"], held, compile_reader(part["field"]))


def check_condition(given: Any, found: ErrorCollector, path: str) -> None:
    """Add each error in a condition from outside. Afterwards an accepted one can be stored as it is."""
    if _joined_parts(given) is None:
        found.add(path, _("must be “all” or “any” with a list of rows"))
        return
    ((join, parts),) = given.items()
    rows = 0
    for place, part in enumerate(parts):
        inner = f"{path}.{join}[{place}]"
        if isinstance(part, Mapping) and part.keys() & set(JOINS):
            if (of_group := _joined_parts(part)) is None:
                found.add(inner, _("must be “all” or “any” with a list of rows"))
                continue
            for position, row in enumerate(of_group):
                _check_condition_row(row, found, f"{inner}.{next(iter(part))}[{position}]")
            rows += len(of_group)
        else:
            _check_condition_row(part, found, inner)
            rows += 1
    if rows > MOST_ROWS:
        found.add(path, _("must not have more than %(most)s rows", most=MOST_ROWS))


def _joined_parts(given: Any) -> list[Any] | None:
    if not isinstance(given, Mapping) or len(given) != 1:
        return None
    ((join, parts),) = given.items()
    return parts if join in JOINS and isinstance(parts, list) and parts else None


def _check_condition_row(row: Any, found: ErrorCollector, path: str) -> None:
    if not isinstance(row, Mapping) or not row.keys() <= {"field", "op", "value"}:
        found.add(path, _("must have field, op and value, or be a group of such rows"))
        return
    name, op = row.get("field"), row.get("op")
    problem = _find_field_problem(name)
    if problem:
        found.add(f"{path}.field", problem)
    if not isinstance(op, str) or op not in OPERATORS:
        found.add(f"{path}.op", _("must be one of %(known)s", known=", ".join(OPERATORS)))
        return
    if not problem:
        counts = bool(counted_type(str(name)))
        allowed = _FOR_TAGS if name == "customer.tags" else _FOR_COUNTS if counts else OPERATORS
        if op not in allowed:
            found.add(
                f"{path}.op",
                _("must be one of %(known)s", known=", ".join(each for each in OPERATORS if each in allowed)),
            )
            return
        value = row.get("value")
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_EARLIER
        if counts and not is_count:
            found.add(f"{path}.value", _("must be a whole number from 0 to %(most)s", most=MOST_EARLIER - 1))
            return
    if value_problem := _find_value_problem(op, row.get("value")):
        found.add(f"{path}.value", value_problem)


def _find_field_problem(name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        return _("is missing")
    if len(name) > LONGEST_FIELD:
        return _("must not be longer than %(most)s characters", most=LONGEST_FIELD)
    if name in PLAIN_FIELDS or counted_type(name) or (name.startswith(ATTRIBUTE) and name != ATTRIBUTE):
        return ""
    if not name.startswith(DATA):
        known = ", ".join([*PLAIN_FIELDS, f"{DATA}…", f"{ATTRIBUTE}…", f"{COUNT_PREFIX}…{COUNT_SUFFIX}"])
        return _("“%(name)s” is not known; known are %(known)s", name=name, known=known)
    path = name.removeprefix(DATA).split(".")
    if len(path) > DEEPEST_PATH or not all(path):
        return _("must be a path of 1 to %(most)s names with dots between them", most=DEEPEST_PATH)
    return ""


def _find_value_problem(op: str, value: Any) -> str:
    if op in WITHOUT_VALUE:
        return "" if value is None else _("must be left out for this op")
    if op in WITH_LIST:
        if not isinstance(value, list) or not 0 < len(value) <= MOST_VALUES:
            return _("must be a list of 1 to %(most)s values", most=MOST_VALUES)
        return next((problem for each in value if (problem := _find_single_problem(each))), "")
    if op in COMPARING and _as_number(value) is None and _as_instant(value) is None:
        return _("must be a number, or a date like 2026-05-01")
    return _find_single_problem(value)


def _find_single_problem(value: Any) -> str:
    if isinstance(value, str):
        return "" if 0 < len(value) <= LONGEST_VALUE else _("must have 1 to %(most)s characters", most=LONGEST_VALUE)
    if isinstance(value, bool) or (is_number(value) and isfinite(value)):
        return ""
    return _("must be text, a number, true or false")


MOST_EARLIER = 100  #: earlier events of a type are counted up to this number
COUNTED_SPAN = timedelta(days=90)

#: By event type, when a customer's stored events occurred: the latest `MOST_EARLIER`, in order.
EventTimes = dict[str, list[datetime]]


def add_event_time(times: EventTimes, event_type: str, occurred_at: datetime) -> None:
    kept = times.setdefault(event_type, [])
    insort(kept, occurred_at)
    del kept[:-MOST_EARLIER]


def count_recent(times: Mapping[str, Sequence[datetime]], occurred_at: datetime) -> dict[str, int]:
    """Return the number of events by type that count for an event that occurred at this time."""
    since = occurred_at - COUNTED_SPAN
    return {event_type: len(kept) - bisect_right(kept, since) for event_type, kept in times.items()}
