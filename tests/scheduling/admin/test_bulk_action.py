"""Workers execute actions on more than a page; the page shows progress, and permitted users stop it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import time_machine
from django.test import Client
from django.utils.timezone import localtime, now
from pytest_django import Settings

from scheduling import sql
from scheduling.admin.failed_tasks import bulk_action
from scheduling.admin.touches import touch
from scheduling.ledger.failures import record_unreadable_message
from scheduling.models import BulkAction, Event, FailedTask, Touch
from scheduling.operations import bulk_actions
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.specs import OVERDUE_AFTER
from tests.scheduling.admin.conftest import Url, read_messages
from tests.support.list_filters import find_ignored_parameters
from tests.support.matrix import MatrixBuilder
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _start_at_once(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """And leave time to search, however slow the machine is."""
    monkeypatch.setattr(bulk_action, "count_within", lambda count: count())
    monkeypatch.setattr(bulk_action, "UNDO_WINDOW", timedelta(0))
    settings.TIMEOUTS = replace(settings.TIMEOUTS, bulk_selection=60.0)


@pytest.fixture
def rows(failed: Callable[..., Any]) -> list[FailedTask]:
    return [failed(f"user{number}") for number in range(3)]


@pytest.fixture
def retry_url(admin_url: Url) -> str:
    return admin_url("failedtask_matching", "retry")


def confirm(client: Client, url: str, page: Any, **given: Any) -> Any:
    return client.post(url, {**dict(page.context["hidden"]), "reason": "it is back", "per_second": "50", **given})


# --- failed tasks -------------------------------------------------------------------------------------------------


def test_bulk_retry_shows_progress_until_done(
    rows: list[FailedTask], operator: Client, admin_url: Url, retry_url: str
) -> None:
    url = f"{retry_url}?reason={rows[0].reason}"
    page = operator.get(url)
    assert page.context["facts"][0] == "Applies to 3 failed tasks."
    assert page.context["form"]["per_second"].value() == 50
    assert not BulkAction.objects.exists()

    answer = confirm(operator, url, page)

    row = BulkAction.objects.get()
    assert answer["location"] == admin_url("bulkaction_change", row.pk)
    assert (row.action, row.filter, row.total) == ("retry", {"reason": rows[0].reason}, 3)
    assert (row.actor_name, row.reason, row.per_second) == ("operator", "it is back", 50)
    shown = operator.get(answer["location"])
    assert "data-live-again" in shown.content.decode()
    assert "0 of 3" in shown.content.decode()
    bulk_actions.continue_bulk_actions()
    shown = operator.get(answer["location"])
    assert "data-live-again" not in shown.content.decode()
    assert (shown.context["percent"], shown.context["progress"]) == (100, "3 of 3")
    told = FailedTask.objects.order_by().values_list("state", "actor_name", "action_reason").distinct()
    assert list(told) == [("retried", "operator", "it is back")]


def test_bulk_action_selects_by_the_clock_of_postgresql(
    rows: list[FailedTask], failed: Callable[..., Any], operator: Client, admin_url: Url
) -> None:
    """The clock of a web node may differ. One that is ahead would add later failures, one behind would miss some."""
    url = admin_url("failedtask_matching", "ignore")
    for minutes in (10, -10):
        with time_machine.travel(datetime.now(UTC) + timedelta(minutes=minutes), tick=True):
            page = operator.get(url)
            assert page.context["facts"][0] == "Applies to 3 failed tasks."
            if minutes > 0:
                late = failed("late")
                FailedTask.objects.filter(pk=late.pk).update(failed_at=sql.now())
            confirm(operator, url, page)
        bulk_actions.continue_bulk_actions()
        assert (FailedTask.objects.get(pk=late.pk).state, BulkAction.objects.latest("pk").total) == ("open", 3)
        FailedTask.objects.exclude(pk=late.pk).update(state="open")
        FailedTask.objects.filter(pk=late.pk).update(state="open", failed_at=sql.now() + timedelta(hours=1))


def test_bulk_action_refuses_unknown_filter(rows: list[FailedTask], operator: Client, retry_url: str) -> None:
    url = f"{retry_url}?detail__contains=order"
    FailedTask.objects.update(detail="order")
    for answer in (operator.get(url), operator.post(url, {"reason": "x", "per_second": "50"})):
        assert answer.status_code == 400
    assert not BulkAction.objects.exists()


def test_all_failures_of_one_cause_are_retried(rows: list[FailedTask], operator: Client, admin_url: Url) -> None:
    (group,) = operator.get(admin_url("failedtask_groups")).context["groups"]
    (link, _title), *_others = read_context(operator, group["link"])["matching_links"]
    answer = confirm(operator, link, operator.get(link), per_second="7")
    row = BulkAction.objects.get()
    assert answer["location"] == admin_url("bulkaction_change", row.pk)
    assert (row.filter["fingerprint"], row.per_second, row.total) == (rows[0].fingerprint, 7, 3)


def test_bulk_action_is_stopped_by_operators_only(
    rows: list[FailedTask], operator: Client, viewer: Client, admin_url: Url
) -> None:
    row = bulk_actions.start_bulk_action(
        "retry", FailedTask.objects.all(), Actor("ann", reason="because"), per_second=0.2
    )
    bulk_actions.continue_bulk_actions()
    page = admin_url("bulkaction_change", row.pk)
    assert "Stop the bulk action" not in viewer.get(page).content.decode()
    shown = operator.get(page).content.decode()
    assert all(words in shown for words in ("1 of 3", "because", "ann", "Stop the bulk action"))
    operator.post(admin_url("bulkaction_cancel", row.pk))
    row.refresh_from_db()
    assert (row.state, row.ended_by) == ("cancelled", "operator")
    answer = operator.post(admin_url("bulkaction_cancel", row.pk))
    assert "The bulk action has already ended." in read_messages(answer)


# --- touches ------------------------------------------------------------------------------------------------------


def test_bulk_cancel_cancels_matching_touches(
    matrix: MatrixBuilder, record_event: Callable[..., Any], operator: Client, admin_url: Url
) -> None:
    """Those that the list shows. What became overdue after the page was shown is not cancelled: that is final."""
    node = matrix.node(delay=timedelta(hours=1))
    matrix.node("other", delay=timedelta(hours=1))
    seen, _kept = record_event(user="ann").task_ids
    later, _kept = record_event(user="bob").task_ids
    Touch.objects.filter(pk=seen).update(due_at=now() - timedelta(minutes=10))
    list_url = f"{admin_url('touch_changelist')}?status=overdue&node__id__exact={node.pk}"
    ((link, _title),) = operator.get(list_url).context["matching_links"]
    page = operator.get(link)
    assert "Applies to 1 touch." in page.content.decode()
    Touch.objects.filter(pk=later).update(due_at=now() - OVERDUE_AFTER)

    operator.post(link, {**dict(page.context["hidden"]), "reason": "wrong text", "per_second": "200"})

    assert BulkAction.objects.get().filter == {"status": "overdue", "node__id__exact": str(node.pk)}
    bulk_actions.continue_bulk_actions()
    assert list(Touch.objects.filter(state="cancelled").values_list("pk", flat=True)) == [seen]


def test_bulk_cancel_by_id_reaches_all_waiting_touches(
    matrix: MatrixBuilder, record_event: Callable[..., Any], operator: Client, admin_url: Url,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A list shows the latest touches of an id only. The others would be sent although a user cancelled them."""
    monkeypatch.setattr(touch, "FOUND", 1)
    monkeypatch.setattr(touch, "LOOKED_AT", 1)
    matrix.node(delay=timedelta(hours=1), guard_dedupe="ignore")
    matrix.node("later", delay=timedelta(hours=2), guard_dedupe="ignore")
    for number in range(3):
        record_event(user="ann", chat_id="c1", event_id=f"e{number}")
    record_event(user="bob", chat_id="c2", event_id="e9")
    first = Touch.objects.order_by("pk")[0]
    retry = Touch.objects.filter(event__event_id="e9").order_by("pk")[0]
    Touch.objects.filter(pk=retry.pk).update(root_id=first.pk)
    url = admin_url("touch_matching", "cancel")
    found = {}
    for term in ("ann", "c1", "e0", str(first.pk), "nobody"):
        found[term] = int(read_context(operator, f"{url}?q={term}")["facts"][0].split()[2])
    assert found == {"ann": 6, "c1": 6, "e0": 2, str(first.pk): 2, "nobody": 0}
    assert len(read_context(operator, f"{admin_url('touch_changelist')}?q=ann")["cl"].result_list) == 1

    page = operator.get(f"{url}?q=c1")
    operator.post(f"{url}?q=c1", {**dict(page.context["hidden"]), "reason": "wrong chat", "per_second": "200"})
    bulk_actions.continue_bulk_actions()
    assert set(Touch.objects.filter(chat_id="c1").values_list("state", flat=True)) == {"cancelled"}
    assert set(Touch.objects.filter(chat_id="c2").values_list("state", flat=True)) == {"scheduled"}


def test_bulk_cancel_refuses_unknown_filter(matrix: MatrixBuilder, operator: Client, admin_url: Url) -> None:
    url = admin_url("touch_matching", "cancel")
    assert operator.get(f"{url}?chat_id__startswith=c").status_code == 400
    answer = operator.get(f"{url}?node__id__exact=one")  # no node is left to choose
    assert (answer.status_code, answer["location"]) == (302, admin_url("touch_changelist"))
    assert "No row matches." in operator.get(f"{url}?status=other").content.decode()


def test_action_of_a_list_affects_ticked_rows_only(
    rows: list[FailedTask], matrix: MatrixBuilder, record_event: Callable[..., Any], operator: Client, admin_url: Url
) -> None:
    """Django acts on all rows of the list if it gets `select_across`, also on those that came after the page."""
    chosen = {"index": "0", "select_across": "1"}
    ignore = {"action": "bulk_ignore", "confirmed": "1", "reason": "r", **chosen}
    operator.post(admin_url("failedtask_changelist"), {**ignore, "_selected_action": [str(rows[0].pk)]})
    operator.post(admin_url("failedtask_changelist"), ignore)
    assert list(FailedTask.objects.exclude(state="open")) == [rows[0]]

    matrix.node("late", trigger="late", delay=timedelta(hours=1))
    first, _other = (record_event("late", user=user).task_ids[0] for user in ("ann", "bob"))
    cancel = {"action": "cancel_selected", "_selected_action": [str(first)], **chosen}
    operator.post(admin_url("touch_changelist"), cancel)
    assert list(Touch.objects.filter(state="cancelled").values_list("pk", flat=True)) == [first]


def test_bulk_action_with_too_many_rows_cannot_start(
    rows: list[FailedTask], operator: Client, retry_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_actions, "MOST_ROWS", 2)
    page = operator.get(retry_url)
    assert page.context["problem"] == "More than 2 rows match. Narrow the list first."
    answer = confirm(operator, retry_url, page)
    assert answer.context["form"].non_field_errors() == ["More than 2 rows match. Narrow the list first."]
    assert not BulkAction.objects.exists()


# --- filters ------------------------------------------------------------------------------------------------------

#: By the address, how many of the rows of the test it means: a filter that is ignored would mean them all.
OF_FAILED_TASKS = {
    "": 3, "state=all": 4, "state=": 3, "state=ignored": 1, "state=x": 0, "origin__exact=touch": 2,
    "reason=not_json": 1, "reason=": 3, "channel=log": 2, "failure=unknown": 0, "state=all&failure=unknown": 1,
    "fingerprint=f1": 0, "state=all&fingerprint=f1": 1, "q=user1": 1, "q=nobody": 0, "q=order_no": 2, "q={event}": 1,
    "q={key}": 1, "q={trace}": 1, "@failed_at_from": 2, "@failed_at_to": 3, "failed_at_to_0=2020-01-01": 0,
    "failed_at_to_0=some day": 0, "failed_at_to_1=10:00": 0, "state=all&reason=not_json&o=1&p=0": 1,
}  # fmt: skip
OF_TOUCHES = {
    "": 4, "status=waiting": 3, "status=overdue": 0, "status=paused": 1, "status=x": 0, "state__exact=queued": 0,
    "reason=x": 1, "state__in=scheduled,queued": 4, "node__id__exact={node}": 2, "node__id__exact=99999": 0,
    "node__channel__id__exact={channel}": 4, "node__channel__id__exact=99999": 0, "priority__exact=0": 2, "q=ann": 2,
    "q=c1": 2, "q=e1": 2, "q=x y": 0, "@due_at_from": 3, "@due_at_to": 2, "due_at_to_0=some day": 0,
    "due_at_to_0=2020-01-01&due_at_to_1=noon": 0, "@settled_at_from": 0,
}  # fmt: skip
TRACE = UUID("0af7651916cd43dd8448eb211c80319c")
ENDS = {"from": timedelta(minutes=-5), "to": timedelta(hours=1)}


def span(address: str) -> str:
    """Write the end of a span for `@due_at_from`."""
    if not address.startswith("@"):
        return address
    field, end = address[1:].rsplit("_", 1)
    at = localtime(now() + ENDS[end])
    return f"{field}_{end}_0={at:%Y-%m-%d}&{field}_{end}_1={at:%H:%M:%S}"


@pytest.mark.parametrize("name", ["failedtask", "touch"])
def test_filter_value_that_means_nothing_selects_no_row(
    rows: list[FailedTask], operator: Client, admin_url: Url, name: str
) -> None:
    assert find_ignored_parameters(operator, admin_url(f"{name}_changelist")) == []


def test_filter_without_a_value_to_offer_selects_no_row(operator: Client, admin_url: Url) -> None:
    """Django ignores the parameter of a filter that has nothing to offer."""
    record_unreadable_message("not_json", b"x", queue="ticks")
    assert not read_context(operator, f"{admin_url('failedtask_changelist')}?channel=x")["cl"].queryset.exists()


def test_filters_of_failed_tasks(rows: list[FailedTask], viewer: Client, admin_url: Url) -> None:
    record_unreadable_message("not_json", b"x", queue="ticks")
    FailedTask.objects.filter(pk=rows[0].pk).update(state="ignored", failure="unknown", fingerprint="f1")
    FailedTask.objects.filter(pk=rows[1].pk).update(failed_at=now() - timedelta(days=1), channel="log")
    sent = Touch.objects.select_related("event").get(pk=rows[2].task_id)
    Event.objects.filter(pk=sent.event_id).update(trace_id=TRACE)
    found = {}
    for address in OF_FAILED_TASKS:
        query = span(address.format(event=sent.event.event_id, key=sent.root_id, trace=TRACE.hex))
        found[address] = read_context(viewer, f"{admin_url('failedtask_changelist')}?{query}")["cl"].queryset.count()
    assert found == OF_FAILED_TASKS


def test_filters_of_touches_select_for_bulk_cancel(
    matrix: MatrixBuilder, record_event: Callable[..., Any], operator: Client, admin_url: Url
) -> None:
    node = matrix.node(delay=timedelta(hours=2))
    other = matrix.node("other", delay=timedelta(minutes=30), priority=0)
    record_event(user="ann", chat_id="c1", event_id="e1")
    record_event(user="bob")
    late, *_rest = Touch.objects.filter(node=other)
    Touch.objects.filter(pk=late.pk).update(due_at=now() - timedelta(minutes=10), paused_by="all", reason="x")
    url = admin_url("touch_matching", "cancel")
    found = {}
    for address in OF_TOUCHES:
        query = span(address.format(node=node.pk, channel=node.channel_id))
        found[address] = int(read_context(operator, f"{url}?{query}")["facts"][0].split()[2])
    assert found == OF_TOUCHES
