"""By what failed tasks are looked for. Each way reads an index, or no further than it says: there may be millions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from uuid import UUID

from django.db.models import Q

from scheduling.models import FailedTask, Touch
from scheduling.operations import queries

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
    events = queries.events_meant(term)
    return list(Touch.objects.filter(event_id__in=events).values_list("pk", flat=True)) if events else []


def _of_uuid(term: str) -> Iterator[UUID]:
    with suppress(ValueError):
        yield from queries.chain_of(UUID(term))


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
