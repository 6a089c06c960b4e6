"""Queries of touches, events, complaints and failed tasks that several pages or programs use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db.models import Q, QuerySet

from scheduling.ids import parse_uuid
from scheduling.models import WAITING, Customer, Event, FailedTask, Touch
from scheduling.policy.specs import OVERDUE_AFTER
from scheduling.redaction import split_by_shown_term
from scheduling.sql import rows

SEARCHED_TOUCHES = 100_000  #: latest touches that a page searches if no index finds the matches

# --- touches ------------------------------------------------------------------------------------------------------


def query_touches(
    *,
    user: str = "",
    event: str = "",
    source: str = "",
    node: str = "",
    state: str = "",
    before: UUID | None = None,
    limit: int = 50,
) -> tuple[list[Touch], UUID | None]:
    """Return at most `limit` touches created before the touch `before`, newest first, and where the search ended.

    The second value is None if the search covered all touches. `event` is the id given by the source or by Aftertouch;
    `source` restricts it. No index finds touches by `node` or `source` alone: each state change of a touch would write
    it. Such a search covers only the latest `SEARCHED_TOUCHES` touches.
    """
    found = prefetch_trace(Touch.objects.all())
    if user:
        found = found.filter(event__customer__user_id=user)
    if event or source:
        found = found.filter(_event_filter(event, source))
    if node:
        found = found.filter(node__key=node)
    if state:
        found = found.filter(state=state)
    older = Touch.objects.order_by("-pk")
    if before:
        found, older = found.filter(pk__lt=before), older.filter(pk__lt=before)
    last = None
    if (node or source) and not user and not event:
        last = older.values_list("pk", flat=True)[SEARCHED_TOUCHES - 1 : SEARCHED_TOUCHES].first()
    if last:
        found = found.filter(pk__gte=last)
    return list(found.order_by("-pk")[:limit]), last


def prefetch_trace(touches: QuerySet[Touch]) -> QuerySet[Touch]:
    """Load events, nodes and customers with any number of touches in one query."""
    return touches.select_related("event", "node", "customer")


def _event_filter(event: str, source: str) -> Q:
    if not event:
        return Q(event__source=source)
    if source:
        return Q(event__source=source, event__event_id=event)
    ids = find_events(event)
    if uuid := parse_uuid(event):
        ids.append(uuid)
    return Q(event_id__in=ids)


def filter_effective_state(value: str, at: datetime) -> Q:
    """Return the filter of a combined state at this time; none for "". No row has an unknown one."""
    due = Q(state="scheduled", paused_by="")
    meant = {
        "": Q(),
        "waiting": due,
        "overdue": (due | Q(state="queued")) & Q(due_at__lt=at - OVERDUE_AFTER),
        "paused": Q(state__in=WAITING) & ~Q(paused_by=""),
        "bad": Q(state__in=("failed", "unknown")),
    }
    return meant.get(value, Q(pk__in=()))


def filter_touches_by_id(term: str) -> Q:
    """Filter by the complete id of a customer, event, chat, trace, task or delivery key, without a limit.

    No index finds all of these. Use it for a bulk action, which has the time and must not miss a touch.
    """
    customers = list(Customer.objects.filter(user_id=term).values_list("pk", flat=True))
    named = Q(customer_id__in=customers) | Q(event_id__in=find_events_by_term(term)) | Q(chat_id=term)
    if uuid := parse_uuid(term):
        named |= Q(task_id=uuid) | Q(root_id=uuid)
    return named


def find_events(event_id: str) -> list[UUID]:
    """Return the events with this id from their sources."""
    return [row[0] for row in rows(_EVENTS_NAMED, {"event_id": event_id})]


def find_events_by_term(term: str) -> list[UUID]:
    """Return the events that an entered id matches: id of the source, id of Aftertouch, or trace id."""
    found = find_events(term)
    if uuid := parse_uuid(term):
        found += [uuid, *Event.objects.filter(trace_id=uuid).values_list("pk", flat=True)[:200]]
    return found


def iterate_retries(root: UUID) -> Iterator[UUID]:
    """Yield the touches that share a delivery key, in order of retry, from the first."""
    task_id: UUID | None = root
    while task_id:
        yield task_id
        task_id = Touch.objects.filter(retry_of=task_id, root_id=root).values_list("task_id", flat=True).first()


def find_republished(task_ids: Sequence[UUID]) -> dict[UUID, UUID]:
    """Return, by task id, the task that republished it."""
    again = Touch.objects.filter(retry_of__in=task_ids).values_list("retry_of", "task_id")
    return {old: new for old, new in again if old}


# The unique index starts with the source, which has few values: skip from one to the next.
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
    """Complaints per delivered touch. `version` is set only for templates."""

    key: str
    version: int | None
    delivered: int
    complaints: int

    @property
    def percent(self) -> float:
        return 100 * self.complaints / self.delivered


def complaint_rates(since: datetime) -> dict[str, list[ComplaintRate]]:
    """Return the rates of touches delivered since then, including later complaints.

    They are those by "node", by "template" and by "community", at most `MOST_RATES` each, by highest rate, then by most
    deliveries.
    """
    given = {"since": since, "most": MOST_RATES}
    return {
        noun: [ComplaintRate(*row) for row in rows(_RATES.format(names=names, condition=condition), given)]
        for noun, names, condition in (
            ("node", "n.key, NULL::int", "true"),
            ("template", "m.key, t.template_version", "m.id IS NOT NULL"),
            ("community", "t.chat_id, NULL::int", "t.chat_id <> ''"),
        )
    }


_RATES = """
SELECT {names}, count(*), count(c.touch_id)
FROM scheduling_touch AS t
LEFT JOIN scheduling_node AS n ON n.id = t.node_id
LEFT JOIN scheduling_template AS m ON m.id = t.template_id
LEFT JOIN (SELECT DISTINCT touch_id FROM scheduling_complaint WHERE touch_id IS NOT NULL) AS c ON c.touch_id = t.task_id
WHERE t.state = 'delivered' AND t.settled_at >= %(since)s AND {condition}
GROUP BY 1, 2 ORDER BY count(c.touch_id)::float / count(*) DESC, count(*) DESC, 1, 2 LIMIT %(most)s
"""


# --- failed tasks -------------------------------------------------------------------------------------------------


def filter_failed_tasks(term: str = "", **equal: str) -> QuerySet[FailedTask]:
    """Return the failed tasks that match a search term (`filter_failed_by_term`).

    `equal` may name state, reason, fingerprint, origin, channel; "" matches any.
    """
    named = {name: value for name, value in equal.items() if value}
    return FailedTask.objects.filter(filter_failed_by_term(term), **named)


def prefetch_notes(tasks: QuerySet[FailedTask]) -> QuerySet[FailedTask]:
    """Load assignees and comments with any number of failed tasks in two queries."""
    return tasks.select_related("assignee").prefetch_related("comments")


SEARCHED_ROWS = 50_000  #: latest failed tasks searched without an index; also most touches of one customer


def filter_failed_by_term(term: str, *, for_users: bool = False) -> Q:
    """Return the filter for a search term.

    A complete id of a task, delivery key, event, trace or user matches at any age. Shop id, chat id, business key, and
    words in detail or reason code match only the latest `SEARCHED_ROWS` failures. `for_users`: words of the detail
    match only where `redact_text` does not hide them.
    """
    term = term.strip()
    if not term:
        return Q()
    failed = Touch.objects.filter(event__customer__user_id=term, state__in=("failed", "unknown"))
    failed_of_customer = list(failed.order_by("-pk").values_list("pk", flat=True)[:SEARCHED_ROWS])
    events = find_events_by_term(term)
    touches_of_events = list(Touch.objects.filter(event_id__in=events).values_list("pk", flat=True)) if events else []
    uuid = parse_uuid(term)
    touches_of_key = list(iterate_retries(uuid)) if uuid else []
    named = Q(task_id__in={*failed_of_customer, *touches_of_events, *touches_of_key})
    keys = FailedTask.objects.order_by("-pk").values_list("pk", flat=True)
    first = keys[SEARCHED_ROWS : SEARCHED_ROWS + 1].first()
    latest = Q(pk__gt=first) if first else Q()
    matches = Q(reason__icontains=term)
    for key in ("user_id", "chat_id", "shop_id", "dedupe_key"):
        matches |= Q(**{f"payload__{key}": term})
    if uuid:
        matches |= Q(root_id=uuid)
    words = latest & Q(detail__icontains=term)
    return named | latest & matches | (_filter_shown(term, words) if for_users else words)


def _filter_shown(term: str, matches: Q) -> Q:
    """Return the filter without rows whose detail hides the term. Most searches find none of these."""
    found = FailedTask.objects.filter(matches).order_by("-pk").values_list("pk", "detail")
    shown, hidden = split_by_shown_term(term, found.iterator())
    return matches & Q(pk__range=(shown[-1], shown[0])) & ~Q(pk__in=hidden) if shown else Q(pk__in=())
