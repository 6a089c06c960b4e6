"""Searches for a failed task: complete ids and remembered words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connection
from django.test import Client

from scheduling.ids import new_id
from scheduling.ledger.failures import record_failed_touches
from scheduling.models import Event, FailedTask, Touch
from scheduling.operations import failed_tasks, queries
from tests.scheduling.admin.conftest import Url
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db

Failed = Callable[..., Any]
TRACE = UUID("0af7651916cd43dd8448eb211c80319c")


@pytest.fixture
def find(viewer: Client, admin_url: Url) -> Callable[[str], set[Any]]:
    def find(term: str) -> set[Any]:
        page = read_context(viewer, admin_url("failedtask_changelist"), {"q": term, "state": "all"})
        return {row.pk for row in page["cl"].result_list}

    return find


def event_of(row: FailedTask) -> Event:
    return Touch.objects.select_related("event").get(pk=str(row.task_id)).event


def test_search_finds_failed_task_by_ids(failed: Failed, find: Callable[[str], set[Any]]) -> None:
    row, _other = failed("ann"), failed("bob")
    event = event_of(row)
    Event.objects.filter(pk=event.pk).update(trace_id=TRACE)
    for term in (row.task_id, row.root_id, event.event_id, event.pk, TRACE, TRACE.hex, "ann", f" {event.event_id} "):
        assert find(str(term)) == {row.pk}, term
    assert find(str(uuid4())) == find("an") == set()


def test_search_finds_uuid_event_and_user_ids(
    failed: Failed, find: Callable[[str], set[Any]], viewer: Client, admin_url: Url
) -> None:
    """Most sources name their events by UUIDs, many their users too."""
    theirs, user = str(uuid4()), str(uuid4())
    row = failed(user)
    failed("bob")
    Event.objects.filter(pk=event_of(row).pk).update(event_id=theirs)
    assert find(theirs) == find(user) == {row.pk}
    for term in (theirs, user):
        touches = read_context(viewer, admin_url("touch_changelist"), {"q": term})["cl"].result_list
        assert [touch.pk for touch in touches] == [row.task_id]


def test_search_finds_words_of_detail_and_reason(failed: Failed, find: Callable[[str], set[Any]]) -> None:
    row, _other = failed("ann"), failed("bob")
    FailedTask.objects.filter(pk=row.pk).update(reason="http_503", detail="upstream: 100% 库存 Busy")
    for term in ("upstream: 100%", "库存", "busy", "http_503"):
        assert find(term) == {row.pk}, term
    assert find("10_%") == find("1.0%") == set()


def test_search_finds_job_by_shop_and_business_key(find: Callable[[str], set[Any]]) -> None:
    row = FailedTask.objects.create(
        origin="rpa_job", task_id=new_id(), root_id=new_id(), failure="failed", reason="exit", fingerprint="f",
        payload={"shop_id": "s1", "dedupe_key": "2026-05-04"},
    )  # fmt: skip
    for term in ("s1", "2026-05-04", str(row.root_id)):
        assert find(term) == {row.pk}, term


def test_search_by_delivery_key_finds_all_retries(failed: Failed, find: Callable[[str], set[Any]]) -> None:
    row = failed()
    failed_tasks.retry_failed_task(row.pk, failed_tasks.Actor("eve"))
    again = Touch.objects.get(retry_of=row.task_id)
    Touch.objects.filter(pk=again.pk).update(state="failed", reason="http_500")
    record_failed_touches([again.pk])
    assert find(str(row.root_id)) == set(FailedTask.objects.values_list("pk", flat=True))
    assert FailedTask.objects.count() == 2


def test_search_finds_old_rows_by_id_only(
    failed: Failed, find: Callable[[str], set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "SEARCHED_ROWS", 2)
    old, middle, new = failed("ann"), failed("bob"), failed("cid")
    event = event_of(old)
    for term in (old.task_id, event.event_id, "ann"):
        assert find(str(term)) == {old.pk}, term
    assert find("order_no") == {middle.pk, new.pk}


@pytest.mark.usefixtures("fresh_tables")
def test_word_search_does_not_scan_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many, all that is read is what an id names and the end of the table."""
    monkeypatch.setattr(queries, "SEARCHED_ROWS", 100)
    many = [
        FailedTask(origin="touch", task_id=new_id(), failure="failed", reason="x", fingerprint="f", state="ignored")
        for _ in range(5_000)
    ]
    FailedTask.objects.bulk_create(many)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE scheduling_failedtask")
    named = FailedTask.objects.filter(queries.filter_failed_by_term("upstream"))
    plan = named.explain()
    assert "Seq Scan on scheduling_failedtask" not in plan, plan
    assert named.count() == 0
