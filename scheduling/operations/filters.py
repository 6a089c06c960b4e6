"""Translate the URL parameters of a list into a query for bulk actions.

An unknown parameter is refused. Ignoring it would affect more rows than the user has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db.models import Model, Q, QuerySet
from django.utils.timezone import make_aware, now

from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput
from scheduling.models import WAITING, FailedTask, Touch
from scheduling.operations import queries
from scheduling.operations.queries import filter_failed_by_shown_term
from scheduling.policy.specs import OVERDUE_AFTER

#: Parameters that affect only how a list is displayed.
DISPLAY_PARAMETERS = frozenset({"o", "p", "all", "e", "_facets"})
MAX_VALUE_LENGTH = 200  #: characters per value
Read = Callable[[str], Q]
ReadAt = Callable[[str, datetime], Q]


def read_filter(address: Mapping[str, Any]) -> dict[str, str]:
    """Return the filter in the URL parameters of a list.

    Raises:
        InvalidInput: a parameter is given twice; the error names it.
    """
    chosen = {}
    for name in address:
        values = address.getlist(name) if hasattr(address, "getlist") else [address[name]]
        if len(values) > 1:
            raise InvalidInput.of(name, _("is given twice"))
        if name not in DISPLAY_PARAMETERS:
            chosen[name] = str(values[0])
    return chosen


@dataclass(frozen=True, slots=True)
class FilteredList:
    model: type[Model]
    since: str  #: field with the time since when a row belongs to the list
    parameters: Mapping[str, Read]
    spans: tuple[str, ...]
    usual: Mapping[str, str]  #: values of parameters that are absent
    timed: Mapping[str, ReadAt] = field(default_factory=dict)  #: parameters whose matching rows change with time

    def matching_rows(self, chosen: Mapping[str, str], as_of: datetime) -> QuerySet[Any]:
        """Return the rows that existed at `as_of` and match the filter.

        Raises:
            InvalidInput: parameters have no meaning; the error names each.
        """
        return self.model._default_manager.filter(self.build_query(chosen, as_of), **{f"{self.since}__lte": as_of})

    def build_query(self, chosen: Mapping[str, str], as_of: datetime) -> Q:
        wanted, errors = Q(), []
        for name, value in {**self.usual, **chosen}.items():
            try:
                wanted &= self._read(name, value, chosen, as_of)
            except ValueError:
                errors.append(FieldError(name, _("“%(given)s” cannot be meant", given=value[:50])))
            except KeyError:
                errors.append(FieldError(name, _("many cannot be chosen by it")))
        if errors:
            raise InvalidInput(*errors)
        return wanted

    def _read(self, name: str, value: str, chosen: Mapping[str, str], as_of: datetime) -> Q:
        if len(value) > MAX_VALUE_LENGTH or "\0" in value:
            raise ValueError
        for span in self.spans:
            for end, compare in (("from", "gte"), ("to", "lt")):
                day, time = f"{span}_{end}_0", f"{span}_{end}_1"
                if name == day and value:
                    return Q(**{f"{span}__{compare}": _parse_date_time(value, chosen.get(time, ""))})
                if name in (day, time):
                    return Q()
        return self.timed[name](value, as_of) if name in self.timed else self.parameters[name](value)


def _parse_date_time(day: str, time: str) -> datetime:
    """Parse a date and time in the server's time zone. Without a time the start of the day applies."""
    for form in settings.DATETIME_INPUT_FORMATS:
        try:
            return make_aware(datetime.strptime(f"{day} {time or '00:00'}", form))  # noqa: DTZ007
        except ValueError:
            continue
    raise ValueError


def compare_value(field: str) -> Read:
    """Filter by equality like the list itself: an empty value means no filter."""
    return lambda value: Q(**{field: value}) if value else Q()


def _exactly(field: str) -> Read:
    return lambda value: Q(**{field: value})


def compare_number(field: str) -> Read:
    return lambda value: Q(**{field: int(value)}) if value else Q()


# --- failed tasks -------------------------------------------------------------------------------------------------


def filter_failed_state(value: str) -> Q:
    """Filter by state: an empty value means open, "all" means no filter."""
    return Q() if value == "all" else Q(state=value or FailedTask.State.OPEN.value)


# --- touches ------------------------------------------------------------------------------------------------------


def filter_effective_state(value: str, as_of: datetime | None = None) -> Q:
    """Return the filter of a combined state: at `as_of`, or now.

    Raises:
        KeyError: the value is unknown.
    """
    due = Q(state="scheduled", paused_by="")
    meant = {
        "": Q(),
        "waiting": due,
        "overdue": (due | Q(state="queued")) & Q(due_at__lt=(as_of or now()) - OVERDUE_AFTER),
        "paused": Q(state__in=WAITING) & ~Q(paused_by="") & (Q(due_at__lte=as_of) if as_of else Q()),
        "bad": Q(state__in=("failed", "unknown")),
    }
    return meant[value]


def _read_effective_state(value: str, as_of: datetime) -> Q:
    try:
        return filter_effective_state(value, as_of)
    except KeyError:
        raise ValueError from None


def _filter_named_touch(term: str) -> Q:
    """Filter by complete ids only. A text search finds sent messages, and those no longer wait."""
    term = term.strip()
    if not term:
        return Q()
    named = Q(customer__user_id=term) | Q(event_id__in=queries.find_events_by_term(term)) | Q(chat_id=term)
    if (uuid := _parse_uuid(term)) is not None:
        named |= Q(task_id=uuid) | Q(root_id=uuid)
    return named


def _parse_uuid(term: str) -> UUID | None:
    try:
        return UUID(term)
    except ValueError:
        return None


FAILED_TASK_ROWS = FilteredList(
    FailedTask,
    "failed_at",
    {
        "state": filter_failed_state, "origin__exact": compare_value("origin"), "reason": compare_value("reason"),
        "channel": compare_value("channel"), "failure": compare_value("failure"),
        "fingerprint": _exactly("fingerprint"),
    },
    ("failed_at",),
    {"state": ""},
    {"q": filter_failed_by_shown_term},
)  # fmt: skip
TOUCH_ROWS = FilteredList(
    Touch,
    "created_at",
    {
        "state__exact": compare_value("state"), "reason": compare_value("reason"),
        "state__in": lambda value: Q(state__in=value.split(",")), "node__id__exact": compare_number("node_id"),
        "node__channel__id__exact": compare_number("node__channel_id"), "priority__exact": compare_number("priority"),
        "q": _filter_named_touch,
    },
    ("due_at", "settled_at"),
    {},
    {"status": _read_effective_state},
)  # fmt: skip
