from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import translation
from pytest_django import DjangoAssertNumQueries

from scheduling.admin import lists
from scheduling.admin.labels import translate_error
from scheduling.admin.lists import ReasonFilter
from scheduling.admin.shown_values import format_instant
from scheduling.admin.touches.timeline import build_timeline
from scheduling.errors import Conflict
from scheduling.models import Attempt, Complaint, Event, Touch, Verdict
from scheduling.models.touch import MOST_VERDICTS
from scheduling.operations.commands import cancel_one_touch
from tests.scheduling.admin.conftest import Url
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder
from tests.support.tables import each_row
from tests.support.touch_logs import add_attempts, add_verdicts
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db(transaction=True)

RecordEvent = Callable[..., Any]
LONG_AGO, HOUR = datetime(2026, 3, 1, tzinfo=UTC), timedelta(hours=1)


def listed(client: Client, url: str) -> set[Any]:
    return {row.pk for row in read_context(client, url)["cl"].result_list}


def test_timeline_is_ordered_by_time(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node()
    (task_id,) = record_event(occurred_at=LONG_AGO).task_ids
    Event.objects.update(received_at=LONG_AGO + HOUR)
    Touch.objects.update(
        state="delivered", created_at=LONG_AGO + HOUR, queued_at=LONG_AGO + 2 * HOUR, lease_until=None, wakeups=2,
        settled_at=LONG_AGO + 6 * HOUR,
    )  # fmt: skip
    touch = Touch.objects.get()
    add_verdicts(touch.pk, Verdict(LONG_AGO + 5 * HOUR, "send"), Verdict(LONG_AGO + 3 * HOUR, "hold", "quiet_hours"))
    add_attempts(touch.pk, Attempt(1, 2, LONG_AGO + 5 * HOUR, LONG_AGO + 6 * HOUR, status=200, body="hi ann"))
    complaint = Complaint.objects.get(event_id=record_event("complaint.received").id)
    Complaint.objects.update(touch=touch)
    page = viewer.get(admin_url("touch_change", task_id))
    assert "hi ann" in page.content.decode()
    moments = page.context["moments"]
    assert [moment.title for moment in moments] == [
        "Event", "Planned", "Dispatched", "Deferred", "Guards passed", "Attempt 1", "Delivered", "Complaint",
    ]  # fmt: skip
    assert [moment.at for moment in moments] == sorted(moment.at for moment in moments)
    assert dict(moments[0].facts)["received at"] == format_instant(LONG_AGO + HOUR)
    assert dict(moments[2].facts)["wake-ups"] == "2"
    assert dict(moments[5].facts)["status"] == "200"
    assert admin_url("complaint_change", complaint.pk) in page.content.decode()


def test_timeline_query_count_is_constant(
    matrix: MatrixBuilder, record_event: RecordEvent, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    matrix.node(delay=HOUR)
    (task_id,) = record_event().task_ids
    for number in range(5):
        add_verdicts(task_id, Verdict(LONG_AGO, "hold", str(number)))
    touch = Touch.objects.select_related("event", "node").get()
    with django_assert_num_queries(4):
        build_timeline(touch)


@pytest.fixture
def create_deferred_touch(matrix: MatrixBuilder, record_event: RecordEvent) -> Iterator[Callable[[int], Touch]]:
    """A touch deferred this many times: each time a minute later, by one more of 100. In English."""

    def create_deferred_touch(times: int) -> Touch:
        matrix.node(delay=HOUR)
        (task_id,) = record_event().task_ids
        Touch.objects.update(state="scheduled", reason="user_cap")
        add_verdicts(
            task_id,
            *(
                Verdict(LONG_AGO + number * timedelta(minutes=1), "hold", "user_cap", observed=str(number), limit="100")
                for number in range(1, times + 1)
            ),
        )
        return Touch.objects.select_related("event", "node").get()

    with translation.override("en"):
        yield create_deferred_touch


@pytest.mark.parametrize("missing", [0, 1])
def test_timeline_of_full_list_names_missing_verdicts(
    create_deferred_touch: Callable[[int], Touch], missing: int
) -> None:
    """A list that is full may have lost verdicts."""
    titles = [each.title for each in build_timeline(create_deferred_touch(MOST_VERDICTS - 1 + missing))]
    deferred = [title for title in titles if title in ("Deferred", "Earlier verdicts are not shown")]
    assert deferred == [
        "Deferred",
        *["Earlier verdicts are not shown"] * missing,
        *["Deferred"] * (MOST_VERDICTS - 2 + missing),
    ]


def test_customer_page_shows_explaining_verdict(
    create_deferred_touch: Callable[[int], Touch], viewer: Client, admin_url: Url
) -> None:
    touch = create_deferred_touch(40)
    add_verdicts(touch.pk, Verdict(LONG_AGO + HOUR * 2, "send"))

    page = read_context(viewer, admin_url("customer_change", touch.customer_id))

    assert [each["figures"] for each in page["upcoming"]] == ["40 / 100"]
    Touch.objects.update(state="suppressed", settled_at=LONG_AGO)
    page = read_context(viewer, admin_url("customer_change", touch.customer_id))
    assert [each["figures"] for each in page["past"]] == ["40 / 100"]


def test_suppressed_touch_shows_rule_and_figures(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node()
    first, second = record_event().task_ids[0], record_event().task_ids[0]
    deliver([first])
    deliver([second])
    page = viewer.get(admin_url("touch_change", second))
    (verdict,) = [moment for moment in page.context["moments"] if moment.title == "Suppressed" and moment.facts[1:]]
    facts = dict(verdict.facts)
    assert facts["rule"] == "Same content sent recently (v1)"
    assert facts["observed"] == "guide"
    assert facts["limit"]
    assert facts["next eligible"]


def test_touch_links_to_failed_task_and_retry(failed: Callable[..., Any], operator: Client, admin_url: Url) -> None:
    row = failed()
    operator.post(admin_url("failedtask_act", row.pk, "retry"), {"reason": "data came"})
    again = Touch.objects.get(retry_of=row.task_id)
    old = operator.get(admin_url("touch_change", row.task_id)).content.decode()
    assert admin_url("failedtask_change", row.pk) in old
    assert admin_url("touch_change", again.pk) in old
    assert admin_url("touch_change", row.task_id) in operator.get(admin_url("touch_change", again.pk)).content.decode()


def test_reason_filter_offers_what_the_latest_touches_have(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url, record_event: RecordEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix.node()

    def offered(query: str = "") -> list[str]:
        specs = read_context(viewer, f"{admin_url('touch_changelist')}{query}")["cl"].filter_specs
        return [code for each in specs if isinstance(each, ReasonFilter) for code, _ in each.lookup_choices]

    for reason in ("cap", "by:ann", ""):
        Touch.objects.filter(pk=record_event().task_ids[0]).update(reason=reason)
    assert offered() == ["by:ann", "cap"]
    assert offered("?reason=dedupe") == ["by:ann", "cap", "dedupe"]
    monkeypatch.setattr(lists, "LOOKED_AT", 0)
    assert offered() == []


@each_row("span, shown", [
    ("occurred_at_from_0=2026-03-02", False), ("occurred_at_to_0=2026-03-02", True),
    ("occurred_at_to_0=2026-03-02&occurred_at_to_1=x", False), ("received_at_from_0=0001-01-01", True),
    ("received_at_to_0=1969-12-31", False), ("occurred_at_to_1=10:00", False),
])  # fmt: skip
def test_event_list_applies_a_span_without_times(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url, record_event: RecordEvent, span: str, shown: bool
) -> None:
    """The form of the filter has two fields, and a day is enough. No row is in a span that cannot be read."""
    record_event(occurred_at=LONG_AGO)
    assert bool(listed(viewer, f"{admin_url('event_changelist')}?{span}")) is shown


def test_touch_list_runs_no_count(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node()
    record_event()
    with CaptureQueriesContext(connection) as queries:
        viewer.get(admin_url("touch_changelist"))
    counts = [query["sql"] for query in queries if "COUNT(" in query["sql"] and "scheduling_touch" in query["sql"]]
    assert counts == []


def test_touch_search_finds_words_of_the_text(
    matrix: MatrixBuilder, viewer: Client, admin_url: Url, record_event: RecordEvent
) -> None:
    matrix.node(template=matrix.template("guide", body="Dear {{ user.name }}, 100% yours"))
    wanted, other = (record_event(user=user).task_ids[0] for user in ("ann", "bob"))
    deliver([wanted, other])
    url = admin_url("touch_changelist")
    assert listed(viewer, f"{url}?q=dear ann,") == {wanted}
    assert listed(viewer, f"{url}?q=100%25 yours") == {wanted, other}
    assert listed(viewer, f"{url}?q=10_%25 yours") == set()


def test_touch_search_by_delivery_key_finds_retries(viewer: Client, admin_url: Url, failed: Callable[..., Any]) -> None:
    from scheduling.operations import failed_tasks

    row = failed()
    again = failed_tasks.retry_failed_task(row.pk, failed_tasks.Actor("eve"))
    chain = {row.task_id, Touch.objects.get(retry_of=row.task_id).pk}
    assert listed(viewer, f"{admin_url('touch_changelist')}?q={row.root_id}") == chain, again


def test_refused_cancel_names_the_state_in_the_readers_language(matrix, record_event):
    matrix.node()
    (task_id,) = record_event().task_ids
    for changes, english, chinese in (
        ({"state": "running"}, "A worker is running the touch.", "工作进程正在处理此触达。"),
        ({"state": "delivered", "lease_until": None, "settled_at": LONG_AGO},
         "The touch is Delivered already.", "触达状态已是“已送达”。"),
    ):  # fmt: skip
        Touch.objects.update(**{"queued_at": LONG_AGO, "sending_at": LONG_AGO, "lease_until": LONG_AGO} | changes)
        with translation.override("zh-hans"):
            with pytest.raises(Conflict) as refused:
                cancel_one_touch(task_id, actor="ann")
            assert (str(refused.value), translate_error(str(refused.value))) == (english, chinese)
