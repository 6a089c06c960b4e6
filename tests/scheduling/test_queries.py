"""What the back office and the API read: what people complain about, and touches by what they are about."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.utils.timezone import now
from pytest_django import DjangoAssertNumQueries

from scheduling.models import Complaint, Touch
from scheduling.operations import queries
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


def deliver(task_id: UUID, at: datetime | None = None, **changes: Any) -> Touch:
    """A touch after its delivery."""
    Touch.objects.filter(pk=task_id).update(
        state="delivered", lease_until=None, settled_at=at or now(), reserved_at=at or now(), **changes
    )
    return Touch.objects.get(pk=task_id)


def complain(touch: Touch, record_event: RecordEvent) -> None:
    """About this touch, without the search for the likely one."""
    event = record_event("complaint.received", user=touch.customer.user_id)
    Complaint.objects.filter(event_id=event.id).update(touch=touch)


# --- complaints ------------------------------------------------------------------------------------------------------


def test_complaint_rates_by_node_template_community(
    matrix: MatrixBuilder, record_event: RecordEvent, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    guide, paid = matrix.node("guide"), matrix.node("paid", trigger="order.paid")
    good, bad = (record_event(user=user, chat_id="c1").task_ids[0] for user in ("ann", "bob"))
    other = record_event("order.paid", user="cid", chat_id="c2").task_ids[0]
    outside = record_event("order.paid", user="dan").task_ids[0]  # of no community
    deliver(good, template=guide.template, template_version=1)
    for task_id in (other, outside):
        deliver(task_id, template=paid.template, template_version=1)
    touch = deliver(bad, template=guide.template, template_version=2)
    complain(touch, record_event)
    complain(touch, record_event)

    with django_assert_num_queries(3):
        rates = queries.complaint_rates(now() - HOUR)

    def summarize_rates(found: list[queries.ComplaintRate]) -> list[tuple[Any, ...]]:
        return [(each.key, each.version, each.delivered, each.complaints, each.rate) for each in found]

    assert summarize_rates(rates.by_node) == [("guide", None, 2, 1, 0.5), ("paid", None, 2, 0, 0)]
    assert summarize_rates(rates.by_template) == [("guide", 2, 1, 1, 1), ("paid", 1, 2, 0, 0), ("guide", 1, 1, 0, 0)]
    assert summarize_rates(rates.by_community) == [("c1", None, 2, 1, 0.5), ("c2", None, 1, 0, 0)]


def test_complaint_rates_count_the_period_only(matrix: MatrixBuilder, record_event: RecordEvent) -> None:
    matrix.node()
    waiting, early = (record_event(user=user).task_ids[0] for user in ("ann", "bob"))
    complain(deliver(early, at=now() - 2 * HOUR), record_event)
    assert Touch.objects.get(pk=waiting).state != "delivered"

    assert queries.complaint_rates(now() - HOUR) == queries.ComplaintRates([], [], [])
    assert queries.complaint_rates(now() - 3 * HOUR).by_node[0].complaints == 1


# --- finding touches -------------------------------------------------------------------------------------------------


def test_query_touches_finds_event_id_in_all_sources_by_two_queries(
    matrix: MatrixBuilder, record_event: RecordEvent, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    matrix.node()
    for number in range(5):
        for event_id in ("e1", "e2"):
            record_event(source=f"s{number}", event_id=event_id, user=f"u{number}")
    with django_assert_num_queries(2):
        page, _ = queries.query_touches(event="e1")
        found = {(each.event.source, each.event.event_id, each.node.key, tuple(each.verdicts)) for each in page}
    assert found == {(f"s{number}", "e1", "guide", ()) for number in range(5)}


def test_query_touches_rare_node_stops_at_the_limit(
    matrix: MatrixBuilder, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "SEARCHED_TOUCHES", 4)
    matrix.node("often")
    matrix.node("rare", trigger="order.paid")
    kinds = [record_event(type).task_ids[0] for type in ["order.paid", *["material.downloaded"] * 8, "order.paid"]]

    pages, before = [], None
    while True:
        found, before = queries.query_touches(node="rare", before=before)
        pages.append([each.pk for each in found])
        if before is None:
            break

    assert pages == [[kinds[-1]], [], [kinds[0]]]
    assert queries.query_touches(node="rare", user="ann") == (
        [*Touch.objects.filter(pk__in=[kinds[0], kinds[-1]]).order_by("-pk")], None,
    )  # fmt: skip
    assert len(queries.query_touches(source="shop", limit=9)[0]) == 4
