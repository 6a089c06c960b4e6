"""Reads that more than one page or program needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet

from scheduling.models import FailedTask, Touch
from scheduling.sql import rows

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
) -> list[Touch]:
    """Touches, newest first, at most `limit`, those made before the touch `before`.

    `event` is an event's id as its source gave it (`source` narrows it down) or as Aftertouch did.
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
    if before:
        found = found.filter(pk__lt=before)
    return list(found.order_by("-pk")[:limit])


def touch(task_id: UUID) -> Touch | None:
    return with_trace(Touch.objects.filter(pk=task_id)).first()


def with_trace(touches: QuerySet[Touch]) -> QuerySet[Touch]:
    """With everything that explains them, in three queries however many there are."""
    return touches.select_related("event", "node", "customer").prefetch_related("verdicts", "attempts")


def _event(event: str, source: str) -> Q:
    if not event:
        return Q(event__source=source)
    if source:
        return Q(event__source=source, event__event_id=event)
    ids = [row[0] for row in rows(_EVENTS_NAMED, {"event_id": event})]
    with suppress(ValueError):
        ids.append(UUID(event))
    return Q(event_id__in=ids)


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


# --- one touch's story --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened to a touch. `kind` is one of `KINDS`; `what` its short code, where it has one."""

    at: datetime
    kind: str
    what: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


#: In the order in which moments of the same instant are told.
KINDS = ("event", "received", "planned", "handed_over", "hold", "suppress", "send", "attempt", "reply", "settled",
         "complaint")  # fmt: skip


def touch_timeline(task_id: UUID) -> list[Moment]:
    """The story of a touch in the order it happened: event, plan, holds, verdicts, attempts, replies, end. Empty where
    there is no such touch."""
    row = with_trace(Touch.objects.filter(pk=task_id)).prefetch_related("complaints").first()
    if row is None:
        return []
    moments = [*_beginning(row), *_verdicts(row), *_attempts(row), *_ending(row)]
    return sorted(moments, key=lambda each: (each.at, KINDS.index(each.kind)))


def _beginning(row: Touch) -> list[Moment]:
    event = row.event
    told = {"source": event.source, "id": event.event_id, "data": event.data}
    moments = [
        Moment(event.occurred_at, "event", event.type, told),
        Moment(event.received_at, "received", event.type),
        Moment(row.created_at, "planned", row.node.key, {"due_at": row.planned_at, "node_version": row.node_version}),
    ]
    if row.queued_at:
        moments.append(Moment(row.queued_at, "handed_over", detail={"hints": row.hints}))
    return moments


def _verdicts(row: Touch) -> list[Moment]:
    return [
        Moment(
            each.at,
            each.decision,
            each.rule,
            {
                "rule_version": each.rule_version,
                "observed": each.observed,
                "limit": each.limit,
                "next_eligible_at": each.next_eligible_at,
            },
        )
        for each in row.verdicts.all()
    ]


def _attempts(row: Touch) -> list[Moment]:
    moments = []
    for each in row.attempts.all():
        sent = {"number": each.number, "subject": each.subject, "body": each.body}
        moments.append(Moment(each.started_at, "attempt", str(each.number), sent))
        if each.ended_at:
            told = {"number": each.number, "reason": each.reason, "detail": each.detail, "status": each.status}
            moments.append(Moment(each.ended_at, "reply", each.outcome, told))
    return moments


def _ending(row: Touch) -> list[Moment]:
    moments = [Moment(each.complained_at, "complaint") for each in row.complaints.all()]
    if row.settled_at:
        moments.append(Moment(row.settled_at, "settled", row.state, {"reason": row.reason}))
    return moments


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


def failed_tasks_page(*, before: UUID | None = None, limit: int = 50, **equal: str) -> list[FailedTask]:
    """Failed tasks, newest first; `equal` may name state, reason, fingerprint, origin and channel. "" matches any."""
    found = FailedTask.objects.filter(**{name: value for name, value in equal.items() if value})
    if before:
        found = found.filter(pk__lt=before)
    return list(found.order_by("-pk")[:limit])
