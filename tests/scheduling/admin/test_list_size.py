"""A full page of a long list stays small."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from rpa_tasks.jobs import wakeups
from scheduling.audit import record_action
from scheduling.models import Calendar, ChannelConfig, FailedTask, Pause, WebhookSubscription
from tests.rpa_tasks.admin.conftest import Market
from tests.scheduling.admin.conftest import Url
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db
ROWS = 50
MOST_BYTES = 150_000  #: of HTML, not compressed


@pytest.fixture
def long_lists(matrix: MatrixBuilder, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", lambda _: None)
    matrix.node("guide")
    market = Market()
    for number in range(ROWS):
        record_event("material.downloaded", f"user{number}", chat_id="c1")
        record_action("acted", ("scheduling.node", number), actor="ann")
        market.waiting("s1", dedupe_key=str(number), delay=timedelta(hours=1))
    FailedTask.objects.bulk_create(
        FailedTask(
            origin="message", failure="unreadable", reason="not_json", fingerprint=f"f{number}", detail="no" * 90
        )
        for number in range(ROWS)
    )


@pytest.mark.usefixtures("long_lists")
def test_list_of_50_rows_is_at_most_150_kilobytes(as_member: Callable[[str], Client]) -> None:
    client = as_member("admin")
    client.cookies["django_language"] = "zh-hans"  # the longer one in bytes
    sizes = {}
    for name in ("touch", "event", "customer", "failedtask", "auditentry"):
        page = client.get(reverse(f"admin:scheduling_{name}_changelist")).content
        assert page.count(b'<tr class="data-row"') == ROWS, name
        sizes[name] = len(page)
    page = client.get(reverse("admin:rpa_tasks_job_changelist")).content
    assert page.count(b'<tr class="data-row"') == ROWS
    sizes["job"] = len(page)
    assert {name: size for name, size in sizes.items() if size > MOST_BYTES} == {}, sizes


def test_queries_of_a_list_do_not_grow_with_its_rows(
    matrix: MatrixBuilder, administrator: Client, admin_url: Url
) -> None:
    """Each row of a list of nodes asked for pauses and counted touches."""

    def add_rows(number: int) -> None:
        key = f"k{number}"
        channel = ChannelConfig.objects.create(key=key, kind="log")
        matrix.node(key, channel=channel)
        Pause.objects.create(scope=f"node:{key}")
        Calendar.objects.create(key=key)
        WebhookSubscription.objects.create(key=key)

    def count_queries(name: str) -> int:
        with CaptureQueriesContext(connection) as found:
            administrator.get(admin_url(f"{name}_changelist"))
        return len(found)

    names = ["node", "channelconfig", "pause", "calendar", "webhooksubscription"]
    add_rows(0)
    for name in names:
        count_queries(name)  # fills caches
    before = [count_queries(name) for name in names]
    for number in range(1, 4):
        add_rows(number)
    assert [count_queries(name) for name in names] == before
