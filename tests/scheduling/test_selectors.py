"""What the back office and the API read: what people complain about, and touches by what they are about."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.utils.timezone import now

from scheduling import selectors
from scheduling.models import Complaint, Customer, Touch

pytestmark = pytest.mark.django_db

LONG_AGO, HOUR = datetime(2026, 3, 1, tzinfo=UTC), timedelta(hours=1)


def deliver(task_id: UUID, at: datetime | None = None, **changes: Any) -> Touch:
    """As it stands after a delivery."""
    Touch.objects.filter(pk=task_id).update(
        state="delivered", lease_until=None, settled_at=at or now(), reserved_at=at or now(), **changes
    )
    return Touch.objects.get(pk=task_id)


def complain(touch: Touch, happen: Callable[..., Any]) -> None:
    """About this touch, without the search for the likely one."""
    event = happen("complaint.received", user=touch.customer.user_id)
    Complaint.objects.filter(event_id=event.id).update(touch=touch)


# --- complaints ------------------------------------------------------------------------------------------------------


def test_complaints_are_counted_by_node_template_and_community(
    matrix: Any, happen: Callable[..., Any], django_assert_num_queries: Any
) -> None:
    guide, paid = matrix.node("guide"), matrix.node("paid", trigger="order.paid")
    good, bad = (happen(user=user, chat_id="c1").task_ids[0] for user in ("ann", "bob"))
    other = happen("order.paid", user="cid", chat_id="c2").task_ids[0]
    deliver(good, template=guide.template, template_version=1)
    deliver(other, template=paid.template, template_version=1)
    touch = deliver(bad, template=guide.template, template_version=2)
    complain(touch, happen)
    complain(touch, happen)

    with django_assert_num_queries(3):
        rates = selectors.complaint_rates(now() - HOUR)

    def told(found: list[selectors.ComplaintRate]) -> list[tuple[Any, ...]]:
        return [(each.key, each.version, each.delivered, each.complaints, each.rate) for each in found]

    assert told(rates.by_node) == [("guide", None, 2, 1, 0.5), ("paid", None, 1, 0, 0)]
    assert told(rates.by_template) == [("guide", 2, 1, 1, 1), ("guide", 1, 1, 0, 0), ("paid", 1, 1, 0, 0)]
    assert told(rates.by_community) == [("c1", None, 2, 1, 0.5), ("c2", None, 1, 0, 0)]


def test_only_what_was_delivered_since_then_is_counted(matrix: Any, happen: Callable[..., Any]) -> None:
    matrix.node()
    waiting, early = (happen(user=user).task_ids[0] for user in ("ann", "bob"))
    complain(deliver(early, at=now() - 2 * HOUR), happen)
    assert Touch.objects.get(pk=waiting).state != "delivered"

    assert selectors.complaint_rates(now() - HOUR) == selectors.ComplaintRates([], [], [])
    assert selectors.complaint_rates(now() - 3 * HOUR).by_node[0].complaints == 1


def test_without_a_community_a_touch_counts_for_none(matrix: Any, happen: Callable[..., Any]) -> None:
    matrix.node()
    deliver(happen().task_ids[0])
    assert selectors.complaint_rates(now() - HOUR).by_community == []


# --- finding touches -------------------------------------------------------------------------------------------------


def test_an_event_is_found_by_its_id_among_many_sources(matrix: Any, happen: Callable[..., Any]) -> None:
    matrix.node()
    for number in range(5):
        happen(source=f"s{number}", event_id="e1", user=f"u{number}")
        happen(source=f"s{number}", event_id="e2", user=f"u{number}")
    found = selectors.touches_page(event="e1")
    assert {(touch.event.source, touch.event.event_id) for touch in found} == {
        (f"s{number}", "e1") for number in range(5)
    }


def test_a_page_costs_the_same_however_many(
    matrix: Any, happen: Callable[..., Any], django_assert_num_queries: Any
) -> None:
    matrix.node()
    for number in range(5):
        happen(user=f"u{number}")
    with django_assert_num_queries(3):
        page = selectors.touches_page(limit=5)
        assert [(touch.node.key, touch.event.type, touch.latest_verdicts) for touch in page] == [  # type: ignore[attr-defined]
            ("guide", "material.downloaded", [])
        ] * 5
    assert Customer.objects.count() == 5
