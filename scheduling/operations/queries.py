"""Reads that more than one page or program needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db.models import Prefetch, Q, QuerySet

from scheduling.models import Event, FailedTask, Touch, Verdict
from scheduling.sql import rows

LOOKED_AT = 100_000  #: touches for one page, where no index finds those that match
LATEST_VERDICTS = 50  #: of a touch; what waits for a receiver that is dead is judged thousands of times

# --- touches ------------------------------------------------------------------------------------------------------


def touches_page(
    *,
    user: str = "",
    event: str = "",
    source: str = "",
    node: str = "",
    state: str = "",
    before: UUID | None = None,
    limit: int = 50,
) -> tuple[list[Touch], UUID | None]:
    """Return touches, newest first, at most `limit`, those made before the touch `before`; and where the search ended,
    or None where it went through all of them.

    `event` is an event's id as its source gave it (`source` narrows it down) or as Aftertouch did. No index finds
    touches by `node` or by `source` alone: each state change of a touch would write it. Such a search looks at the
    latest `LOOKED_AT` touches only.
    """
    found = with_trace(Touch.objects.all())
    if user:
        found = found.filter(customer__user_id=user)
    if event or source:
        found = found.filter(_event(event, source))
    if node:
        found = found.filter(node__key=node)
    if state:
        found = found.filter(state=state)
    older = Touch.objects.order_by("-pk")
    if before:
        found, older = found.filter(pk__lt=before), older.filter(pk__lt=before)
    last = None
    if (node or source) and not user and not event:
        last = older.values_list("pk", flat=True)[LOOKED_AT - 1 : LOOKED_AT].first()
    if last:
        found = found.filter(pk__gte=last)
    return list(found.order_by("-pk")[:limit]), last


def touch(task_id: UUID) -> Touch | None:
    return with_trace(Touch.objects.filter(pk=task_id)).first()


def with_trace(touches: QuerySet[Touch]) -> QuerySet[Touch]:
    """With everything that explains them, in three queries however many there are. Their verdicts are the last ones, as
    `latest_verdicts`, the latest first."""
    latest = Prefetch("verdicts", Verdict.objects.order_by("-id")[:LATEST_VERDICTS], to_attr="latest_verdicts")
    return touches.select_related("event", "node", "customer").prefetch_related(latest, "attempts")


def _event(event: str, source: str) -> Q:
    if not event:
        return Q(event__source=source)
    if source:
        return Q(event__source=source, event__event_id=event)
    ids = events_named(event)
    with suppress(ValueError):
        ids.append(UUID(event))
    return Q(event_id__in=ids)


def events_named(event_id: str) -> list[UUID]:
    """The events that their sources gave this id."""
    return [row[0] for row in rows(_EVENTS_NAMED, {"event_id": event_id})]


def events_meant(term: str) -> list[UUID]:
    """The events that somebody means who types an id: their sources' one, ours, or that of a trace."""
    found = events_named(term)
    with suppress(ValueError):
        uuid = UUID(term)
        found += [uuid, *Event.objects.filter(trace_id=uuid).values_list("pk", flat=True)[:200]]
    return found


def chain_of(root: UUID) -> Iterator[UUID]:
    """Each touch that the delivery key went on to, from the first."""
    task_id: UUID | None = root
    while task_id:
        yield task_id
        task_id = Touch.objects.filter(retry_of=task_id, root_id=root).values_list("task_id", flat=True).first()


def retried_as(task_ids: Sequence[UUID]) -> dict[UUID, UUID]:
    """By task id, the task that it was published again as."""
    again = Touch.objects.filter(retry_of__in=task_ids).values_list("retry_of", "task_id")
    return {old: new for old, new in again if old}


# The unique index leads with the source, of which there are few: skip from one to the next.
_EVENTS_NAMED = """
WITH RECURSIVE sources(source) AS (
    (SELECT source FROM scheduling_event ORDER BY source LIMIT 1)
    UNION ALL
    SELECT (SELECT source FROM scheduling_event WHERE source > sources.source ORDER BY source LIMIT 1)
    FROM sources WHERE sources.source IS NOT NULL
)
SELECT event.id FROM sources
JOIN scheduling_event AS event ON event.source = sources.source AND event.event_id = %(event_id)s
LIMIT 200
"""


# --- complaints ---------------------------------------------------------------------------------------------------


MOST_RATES = 100


@dataclass(frozen=True, slots=True)
class ComplaintRate:
    """Of the touches delivered, how many were complained about. `version` only where templates are counted."""

    key: str
    version: int | None
    delivered: int
    complaints: int

    @property
    def rate(self) -> float:
        return self.complaints / self.delivered


@dataclass(frozen=True, slots=True)
class ComplaintRates:
    """The worst first, then the largest; of each at most `MOST_RATES`."""

    by_node: list[ComplaintRate]
    by_template: list[ComplaintRate]
    by_community: list[ComplaintRate]


def complaint_rates(since: datetime) -> ComplaintRates:
    """Complaints about what was delivered since then, whenever they came; one statement for each way of counting."""
    return ComplaintRates(
        by_node=_rates(since, _BY_NODE), by_template=_rates(since, _BY_TEMPLATE), by_community=_rates(since, _BY_CHAT)
    )


def _rates(since: datetime, sql: str) -> list[ComplaintRate]:
    return [ComplaintRate(*row) for row in rows(sql, {"since": since})]


_COUNTS = "count(*), count(c.touch_id)"
_DELIVERED = """
scheduling_touch AS t
LEFT JOIN (SELECT DISTINCT touch_id FROM scheduling_complaint WHERE touch_id IS NOT NULL) AS c ON c.touch_id = t.task_id
"""
_SINCE = "t.state = 'delivered' AND t.settled_at >= %(since)s"
_WORST = f"ORDER BY count(c.touch_id)::float / count(*) DESC, count(*) DESC, 1, 2 LIMIT {MOST_RATES}"

_BY_NODE = f"""
SELECT n.key, NULL::int, {_COUNTS} FROM {_DELIVERED} JOIN scheduling_node AS n ON n.id = t.node_id
WHERE {_SINCE} GROUP BY n.key {_WORST}
"""  # noqa: S608 (made of constants)
_BY_TEMPLATE = f"""
SELECT m.key, t.template_version, {_COUNTS} FROM {_DELIVERED} JOIN scheduling_template AS m ON m.id = t.template_id
WHERE {_SINCE} GROUP BY m.key, t.template_version {_WORST}
"""  # noqa: S608 (made of constants)
_BY_CHAT = f"""
SELECT t.chat_id, NULL::int, {_COUNTS} FROM {_DELIVERED}
WHERE {_SINCE} AND t.chat_id <> '' GROUP BY t.chat_id {_WORST}
"""  # noqa: S608 (made of constants)


# --- failed tasks -------------------------------------------------------------------------------------------------


def failed_tasks_page(
    named: Q | None = None, *, before: UUID | None = None, limit: int = 50, **equal: str
) -> list[FailedTask]:
    """Failed tasks, newest first; `equal` may name state, reason, fingerprint, origin and channel. "" matches any."""
    found = FailedTask.objects.filter(named or Q(), **{name: value for name, value in equal.items() if value})
    if before:
        found = found.filter(pk__lt=before)
    return list(found.order_by("-pk")[:limit])


SEARCHED_ROWS = 50_000  #: of the latest failed tasks, for what no index knows; and of the touches of one customer


def failed_named(term: str, by: datetime | None = None) -> Q:
    """By an id in full (task, delivery key, event, trace, user), however old. By that of a shop or chat, a business
    key, words of the detail or of the reason's code: among the latest that had failed `by` then."""
    term = term.strip()
    if not term:
        return Q()
    named = Q(task_id__in={*_of_customer(term), *_of_events(term), *_of_uuid(term)})
    return named | _of_latest(by) & _told_in_row(term)


def _of_customer(term: str) -> list[UUID]:
    failed = Touch.objects.filter(customer__user_id=term, state__in=("failed", "unknown"))
    return list(failed.order_by("-pk").values_list("pk", flat=True)[:SEARCHED_ROWS])


def _of_events(term: str) -> list[UUID]:
    events = events_meant(term)
    return list(Touch.objects.filter(event_id__in=events).values_list("pk", flat=True)) if events else []


def _of_uuid(term: str) -> Iterator[UUID]:
    with suppress(ValueError):
        yield from chain_of(UUID(term))


def _of_latest(by: datetime | None) -> Q:
    had_failed = FailedTask.objects.filter(failed_at__lte=by) if by else FailedTask.objects.all()
    keys = had_failed.order_by("-pk").values_list("pk", flat=True)
    first = keys[SEARCHED_ROWS : SEARCHED_ROWS + 1].first()
    return Q(pk__gt=first) if first else Q()


def _told_in_row(term: str) -> Q:
    told = Q(reason__icontains=term) | Q(detail__icontains=term)
    for key in ("user_id", "chat_id", "shop_id", "dedupe_key"):
        told |= Q(**{f"payload__{key}": term})
    with suppress(ValueError):
        told |= Q(root_id=UUID(term))
    return told
