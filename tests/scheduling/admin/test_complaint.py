from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client
from django.utils.timezone import now

from scheduling.models import Complaint, Touch
from scheduling.operations import queries
from tests.scheduling.admin.conftest import Url
from tests.support.matrix import MatrixBuilder
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db

RecordEvent = Callable[..., Any]


@pytest.fixture
def delivered(matrix: MatrixBuilder, record_event: RecordEvent) -> Callable[..., Touch]:
    """A touch that was delivered some days ago, complained about or not."""
    matrix.node("guide")
    matrix.node("paid", trigger="order.paid", template=matrix.template("paid"))

    def delivered(user: str, type: str = "material.downloaded", *, days: int = 1, complaint: bool = False) -> Touch:
        (task_id,) = record_event(type, user=user, chat_id="c1").task_ids
        touch = Touch.objects.select_related("node__template").get(pk=task_id)
        at = now() - timedelta(days=days)
        Touch.objects.filter(pk=task_id).update(
            state="delivered", lease_until=None, settled_at=at, template=touch.node.template, template_version=3
        )
        if complaint:
            Complaint.objects.filter(event_id=record_event("complaint.received", user=user).id).update(touch=touch)
        return touch

    return delivered


def read_tables(page: Any) -> list[list[tuple[Any, ...]]]:
    return [
        [(row.key, row.version, row.delivered, row.complaints, row.percent) for row in rates]
        for _title, _noun, rates in page["tables"]
    ]


def test_complaint_rates_are_sorted_worst_first(
    delivered: Callable[..., Touch], record_event: RecordEvent, viewer: Client, admin_url: Url
) -> None:
    """Two complaints about one touch are one, and a touch of no community belongs to none."""
    delivered("ann", "order.paid")
    outside = delivered("bob")
    complained = delivered("cid", complaint=True)
    Complaint.objects.filter(event_id=record_event("complaint.received", user="cid").id).update(touch=complained)
    Touch.objects.filter(pk=outside.pk).update(chat_id="", template_version=2)
    page = viewer.get(admin_url("complaint_rates"))
    nodes, templates, communities = read_tables(page.context)
    assert nodes == [("guide", None, 2, 1, 50), ("paid", None, 1, 0, 0)]
    assert templates == [("guide", 3, 1, 1, 100), ("guide", 2, 1, 0, 0), ("paid", 3, 1, 0, 0)]
    assert communities == [("c1", None, 2, 1, 50)]
    text = page.content.decode()
    assert "guide (v3)" in text
    assert "50.00%" in text
    assert admin_url("complaint_rates") in viewer.get(admin_url("complaint_changelist")).content.decode()


def test_complaint_rates_period_can_be_chosen(delivered: Callable[..., Touch], viewer: Client, admin_url: Url) -> None:
    for user, days in (("ann", 1), ("bob", 20), ("cid", 60)):
        delivered(user, days=days)
    for query, count in (("?days=7", 1), ("", 2), ("?days=90", 3), ("?days=9999999999", 2)):
        nodes, _templates, _communities = read_tables(read_context(viewer, admin_url("complaint_rates") + query))
        assert nodes == [("guide", None, count, 0, 0)], query


def test_complaint_rates_report_slow_count(viewer: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(since: Any) -> None:
        raise OperationalError("canceling statement due to statement timeout")

    monkeypatch.setattr(queries, "complaint_rates", slow)
    page = viewer.get(admin_url("complaint_rates"))
    assert "exceeded its time limit" in page.content.decode()
