from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import time_machine
from django.test import Client
from django.utils.timezone import now

from scheduling.admin.failed_tasks import failed_task
from scheduling.ledger.failures import record_unreadable_message
from scheduling.models import FailedTask, Touch
from scheduling.operations.undo import UNDO_WINDOW
from tests.scheduling.admin.conftest import Url, read_messages
from tests.support.tables import each_row
from tests.support.undrawn import read_context, read_refusal

pytestmark = pytest.mark.django_db

Failed = Callable[..., Any]


def confirm(client: Client, url: str, action: str, **data: Any) -> Any:
    """The confirmation page's form, as a browser would send it on."""
    page = client.post(url, {"action": action, **data})
    assert page.status_code == 200
    hidden: dict[str, list[str]] = {}
    for name, value in page.context["hidden"]:
        hidden.setdefault(name, []).append(str(value))
    return client.post(url, {**hidden, "reason": "because"})


def test_failed_task_page_shows_original_and_attempts(failed: Failed, viewer: Client, admin_url: Url) -> None:
    row = failed()
    row.attempts = [{"number": 1, "started_at": now().isoformat(), "outcome": "transient", "reason": "http_503",
                     "detail": "busy", "status": 503}]  # fmt: skip
    row.save()
    page = viewer.get(admin_url("failedtask_change", row.pk)).content.decode()
    for words in ("Data for the text is missing", "broken", "Receiver answered HTTP 503", "busy"):
        assert words in page


def test_retry_keeps_delivery_key_and_resend_does_not(failed: Failed, operator: Client, admin_url: Url) -> None:
    same, new = failed("ann"), failed("bob")
    operator.post(admin_url("failedtask_act", same.pk, "retry"), {"reason": "fixed"})
    page = operator.get(admin_url("failedtask_act", new.pk, "again")).content.decode()
    assert "the customer receives it twice" in page
    operator.post(admin_url("failedtask_act", new.pk, "again"), {"reason": "asked for"})
    assert Touch.objects.get(retry_of=same.task_id).root_id == same.root_id
    assert Touch.objects.get(retry_of=new.task_id).root_id != new.root_id
    same.refresh_from_db()
    assert (same.state, same.actor_name, same.action_reason) == ("retried", "operator", "fixed")
    done = operator.get(admin_url("failedtask_change", same.pk)).content.decode()
    assert "fixed" in done
    assert "operator" in done


@each_row(
    "verb, state",
    [
        ("delivered", "resolved_delivered"), ("not_delivered", "resolved_not_delivered"), ("ignore", "ignored"),
        ("archive", "archived"),
    ],
)  # fmt: skip
def test_unknown_failed_task_is_resolved_by_a_person_with_a_reason(
    failed: Failed, operator: Client, admin_url: Url, verb: str, state: str
) -> None:
    row = failed(unknown=True)
    url = admin_url("failedtask_act", row.pk, verb)
    assert "required" in str(read_refusal(operator, url, {"reason": ""})["form"].errors)
    row.refresh_from_db()
    assert row.state == "open"
    operator.post(url, {"reason": "asked the customer"})
    row.refresh_from_db()
    assert row.state == state


def test_second_action_reports_a_conflict(failed: Failed, operator: Client, admin_url: Url) -> None:
    row = failed()
    url = admin_url("failedtask_act", row.pk, "retry")
    operator.post(url, {"reason": "first"})
    answer = operator.post(url, {"reason": "second"})
    assert "another user acted first" in read_messages(answer)
    assert Touch.objects.filter(retry_of=row.task_id).count() == 1


def test_bulk_retry_spreads_selected_touches_and_bulk_resend_gives_new_delivery_keys(
    failed: Failed, operator: Client, admin_url: Url
) -> None:
    """From the clock of PostgreSQL. What cannot be sent again is skipped."""
    rows = [failed(f"user{number}") for number in range(5)]
    record_unreadable_message("not_json", "garbage", queue="ticks")
    unreadable = FailedTask.objects.get(origin="message")
    url = admin_url("failedtask_changelist")
    before, chosen = now() + UNDO_WINDOW, [str(row.pk) for row in (rows[0], unreadable, rows[1])]
    with time_machine.travel(now() + timedelta(minutes=10), tick=True):
        answer = confirm(operator, url, "bulk_retry", _selected_action=chosen)
    assert "Retry: 2 failed tasks." in read_messages(answer)
    assert "1 failed task was skipped" in read_messages(answer)
    first, second = Touch.objects.exclude(retry_of=None).order_by("due_at")
    assert second.due_at - first.due_at == timedelta(seconds=0.05)
    assert before <= first.due_at <= now() + UNDO_WINDOW
    confirm(operator, url, "bulk_again", _selected_action=[str(row.pk) for row in rows[2:4]])
    resent = Touch.objects.filter(retry_of__in=[row.task_id for row in rows[2:]])
    assert {each.retry_of: each.root_id for each in resent} == {each.retry_of: each.task_id for each in resent}
    assert len(resent) == 2


def test_failed_tasks_are_grouped_by_cause_with_the_trend_of_a_day(
    failed: Failed, viewer: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [failed(f"user{number}") for number in range(3)]
    FailedTask.objects.filter(pk=failed("odd").pk).update(fingerprint="other")
    FailedTask.objects.filter(pk=rows[0].pk).update(failed_at=now() - timedelta(days=2))
    page = viewer.get(admin_url("failedtask_groups"))
    group, other = page.context["groups"]
    assert (group["count"], other["count"], len(group["trend"]["bars"])) == (3, 1, 1)
    assert group["trend"]["words"].startswith("2 in the last 24 hours")
    assert 'role="img" aria-label="2 in the last 24 hours' in page.content.decode()
    shown = read_context(viewer, group["link"])["cl"].result_list
    assert {row.pk for row in shown} == {row.pk for row in rows}
    monkeypatch.setattr(failed_task, "count_within", lambda count: None)
    page = viewer.get(admin_url("failedtask_groups"))
    assert page.context["groups"][0]["trend"] is None
    assert "Counting took too long." in page.content.decode()


def test_unreadable_message_has_no_retry_and_no_edit(editor: Client, admin_url: Url) -> None:
    record_unreadable_message("not_json", "garbage", queue="ticks")
    row = FailedTask.objects.get()
    page = read_context(editor, admin_url("failedtask_change", row.pk))
    assert [str(each["action"].title) for each in page["offered"]] == ["Ignore", "Archive"]
    assert page["edit_link"] == ""
    assert editor.get(admin_url("failedtask_edit", row.pk)).status_code == 404


def test_editor_edits_text_and_both_pages_show_the_difference(
    failed: Failed, editor: Client, viewer: Client, admin_url: Url
) -> None:
    row = failed()
    url = admin_url("failedtask_edit", row.pk)
    assert url in editor.get(admin_url("failedtask_change", row.pk)).content.decode()
    assert editor.get(url).context["form"].initial == {"subject": "", "body": "{{ event.data.order_no }}"}
    refused = editor.post(url, {"body": "Order {{ event.data.order_no }}", "reason": "number missing"})
    assert "{{ event.data.order_no }}" in str(refused.context["form"].errors["body"])

    editor.post(url, {"body": "Order 7 for 13812345678", "reason": "number missing"})

    row.refresh_from_db()
    again = Touch.objects.get(retry_of=row.task_id)
    assert (row.state, row.retried_as, row.action_reason) == ("retried", again.pk, "number missing")
    assert row.difference["after"] == {"subject": "", "body": "Order 7 for 13812345678"}
    for page in (("failedtask_change", row.pk), ("touch_change", row.task_id), ("touch_change", again.pk)):
        shown = viewer.get(admin_url(*page)).content.decode()
        assert "<ins>Order 7 for 138****5678</ins>" in shown
        assert "13812345678" not in shown


def test_second_edit_reports_a_conflict(failed: Failed, editor: Client, admin_url: Url) -> None:
    row = failed()
    url = admin_url("failedtask_edit", row.pk)
    editor.post(url, {"body": "first", "reason": "x"})
    answer = editor.post(url, {"body": "second", "reason": "x"})
    assert "already" in read_messages(answer)
    assert "already" in editor.get(url).context["problem"]
    assert Touch.objects.filter(retry_of=row.task_id).count() == 1


def test_edit_of_unknown_outcome_warns_and_sends_as_new(failed: Failed, editor: Client, admin_url: Url) -> None:
    row = failed(unknown=True)
    url = admin_url("failedtask_edit", row.pk)
    assert "may have had its effect" in editor.get(url).content.decode()
    editor.post(url, {"body": "again", "reason": "x"})
    again = Touch.objects.get(retry_of=row.task_id)
    assert again.root_id == again.pk
    assert again.reserved_at


def test_operator_assigns_comments_and_filters(
    failed: Failed, operator: Client, viewer: Client, admin_url: Url
) -> None:
    mine, other = failed("ann"), failed("bob")
    operator.post(admin_url("failedtask_assign", mine.pk), {"user": "operator"})
    text = "see https://example.com/a?b=1 <script> call 13812345678"
    operator.post(admin_url("failedtask_comment", mine.pk), {"text": text})
    shown = viewer.get(admin_url("failedtask_change", mine.pk)).content.decode()
    assert 'href="https://example.com/a?b=1" target="_blank" rel="noopener noreferrer nofollow"' in shown
    assert "&lt;script&gt; call 138****5678" in shown
    assert 'name="text"' not in shown

    changelist = admin_url("failedtask_changelist")

    def listed(client: Client, assignee: str) -> list[Any]:
        return [row.pk for row in read_context(client, f"{changelist}?assignee={assignee}")["cl"].result_list]

    assert (listed(operator, "me"), listed(viewer, "me")) == ([mine.pk], [])
    assert listed(operator, "none") == [other.pk]
    assert "operator" in operator.get(changelist).content.decode()
    operator.post(admin_url("failedtask_assign", mine.pk), {"user": ""})
    assert listed(operator, "me") == []


def test_invalid_assignee_and_empty_comment_are_reported(failed: Failed, operator: Client, admin_url: Url) -> None:
    row = failed()
    for name in ("x", "x\0"):
        assert "no active user" in read_messages(operator.post(admin_url("failedtask_assign", row.pk), {"user": name}))
    assert "required" in read_messages(operator.post(admin_url("failedtask_comment", row.pk), {"text": " "}))
    assert not row.comments.exists()


@each_row("act, given", [("assign", {"user": ""}), ("comment", {"text": "seen"})])
def test_act_on_a_failed_task_that_retention_has_just_deleted_is_not_found(
    failed: Callable[..., Any], operator: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch, act: str,
    given: dict[str, str],
) -> None:  # fmt: skip
    row = failed()
    read = failed_task.FailedTaskAdmin.get_row_or_404

    def read_and_delete(self: Any, *args: Any) -> Any:
        found = read(self, *args)
        FailedTask.objects.filter(pk=found.pk).delete()
        return found

    monkeypatch.setattr(failed_task.FailedTaskAdmin, "get_row_or_404", read_and_delete)
    assert operator.post(admin_url(f"failedtask_{act}", row.pk), given).status_code == 404
