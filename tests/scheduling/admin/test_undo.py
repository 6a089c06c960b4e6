"""The message of an act takes it back, unless something followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import F
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from scheduling import sql
from scheduling.ids import first_id_at
from scheduling.models import AuditEntry, BulkAction, FailedTask, Node, Pause, Touch, UndoableAct
from scheduling.operations import bulk_actions, commands, retention
from scheduling.operations import undo as operations_undo
from tests.scheduling.admin.conftest import FillForm, SaveForm, Url
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)

OVER = "Not undone: The time to undo is over, or it was undone already."


def act(client: Client, url: str, **given: Any) -> Any:
    """Return the message of an act, and check that the page has its button."""
    page = client.post(url, given, follow=True)
    message = next(iter(page.context["messages"]))
    if message.extra_tags:
        assert f'action="{message.extra_tags}"' in page.content.decode()
    return message


def undo(client: Client, message: Any) -> str:
    return " ".join(str(each) for each in client.post(message.extra_tags, follow=True).context["messages"])


def latest_undo() -> tuple[str, str, str]:
    entry = AuditEntry.objects.filter(action="undone").latest("id")
    return entry.actor, entry.kind, entry.object_id


def pause(client: Client, admin_url: Url, scope: str) -> Any:
    return act(client, admin_url("pause_add"), scope=scope, reason="r")


def test_pause_is_undone_once_within_ten_seconds(matrix: MatrixBuilder, operator: Client, admin_url: Url) -> None:
    message = pause(operator, admin_url, "all")
    assert undo(operator, message) == "Undone: Paused: everything."
    assert latest_undo() == ("operator", "scheduling.pause", "all")
    assert undo(operator, message) == OVER
    message = pause(operator, admin_url, "all")
    UndoableAct.objects.update(made_at=F("made_at") - operations_undo.UNDO_WINDOW)
    assert undo(operator, message) == OVER
    assert Pause.objects.filter(scope="all").exists()


def test_undo_ends_only_the_own_pause(matrix: MatrixBuilder, operator: Client, editor: Client, admin_url: Url) -> None:
    message = pause(operator, admin_url, "all")
    assert undo(editor, message) == OVER
    commands.pause_scope("all", actor="api")
    assert undo(operator, message) == OVER, "another repeated it"
    commands.resume_scope("all")
    message = pause(operator, admin_url, "all")
    commands.resume_scope("all")
    commands.pause_scope("all")
    assert undo(operator, message) == "Not undone: The pause had already ended."
    assert Pause.objects.filter(scope="all").exists()
    assert pause(operator, admin_url, "all").extra_tags == ""


def test_retention_deletes_expired_offers(matrix: MatrixBuilder, operator: Client, admin_url: Url) -> None:
    for scope in ("all", "channel:log"):
        pause(operator, admin_url, scope)
    old = UndoableAct.objects.filter(keys=["all"])
    offered = now() - timedelta(minutes=2)
    old.update(made_at=offered, id=first_id_at(offered))
    assert retention.delete_expired_rows()["scheduling_undoableact"] == 1
    assert list(UndoableAct.objects.values_list("keys", flat=True)) == [["channel:log"]]


# --- cancelled touches ------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(matrix: MatrixBuilder, record_event: RecordEvent) -> list[UUID]:
    matrix.node(delay=timedelta(minutes=15))
    return [record_event(user=user).task_ids[0] for user in ("ann", "bob")]


def test_undone_cancel_plans_the_touch_again_at_its_time(waiting: list[UUID], operator: Client, admin_url: Url) -> None:
    message = act(operator, admin_url("touch_cancel", waiting[0]))
    old = Touch.objects.get(pk=waiting[0])
    assert undo(operator, message) == f"Undone: touch {old}."
    again = Touch.objects.get(retry_of=old.pk)
    assert (again.state, again.root_id, again.due_at, again.expires_at, again.reserved_at) == (
        "scheduled", old.root_id, old.due_at, old.expires_at, None,
    )  # fmt: skip
    assert latest_undo() == ("operator", "scheduling.touch", str(old.pk))
    overdue = {"id": waiting[1]}
    sql.execute("UPDATE scheduling_touch SET due_at = now() - interval '1 minute' WHERE task_id = %(id)s", overdue)
    undo(operator, act(operator, admin_url("touch_cancel", waiting[1])))
    assert abs(Touch.objects.get(retry_of=waiting[1]).due_at - now()) < timedelta(seconds=30), "due at once"


def test_cancelled_selection_is_undone_where_nothing_followed(
    waiting: list[UUID], record_event: RecordEvent, operator: Client, admin_url: Url
) -> None:
    shown = f"{admin_url('touch_changelist')}?state__exact=scheduled"  # has them no more afterwards
    message = act(operator, shown, action="cancel_selected", _selected_action=waiting)
    assert str(message) == "2 touches were cancelled."
    record_event("order.paid", "bob")
    told = undo(operator, message)
    assert told == "Undone for 1 row. Not undone for all: an event of the customer has arrived since"
    assert list(Touch.objects.filter(retry_of__isnull=False).values_list("retry_of", flat=True)) == waiting[:1]


def test_cancel_is_not_undone_while_an_attempt_may_have_had_its_effect(
    waiting: list[UUID], operator: Client, admin_url: Url
) -> None:
    attempt = json.dumps([[1, 1, 0, 0, "unknown", "timeout", "", None, "", "text"]])
    with connection.cursor() as cursor:
        cursor.execute("UPDATE scheduling_touch SET attempts = %s::text::jsonb WHERE task_id = %s",
                       [attempt, waiting[0]])  # fmt: skip
    message = act(operator, admin_url("touch_cancel", waiting[0]))
    assert undo(operator, message) == "Not undone: an earlier attempt of the touch may have had its effect"


def test_undo_needs_the_permission_of_the_act(waiting: list[UUID], operator: Client, admin_url: Url) -> None:
    message = act(operator, admin_url("touch_cancel", waiting[0]))
    User.objects.get(username="operator").groups.clear()
    assert operator.post(message.extra_tags).status_code == 403
    assert not Touch.objects.filter(retry_of=waiting[0]).exists()


# --- retries ----------------------------------------------------------------------------------------------------------


def retry(client: Client, admin_url: Url, row: FailedTask, name: str = "retry") -> Any:
    return act(client, admin_url("failedtask_act", row.pk, name), reason="r")


@pytest.mark.parametrize("name", ["retry", "again"])
def test_undone_retry_opens_the_failed_task_with_its_slot_and_sends_nothing(
    failed: Callable[..., Any], operator: Client, admin_url: Url, name: str
) -> None:
    row = failed(unknown=True)
    held = now() - timedelta(hours=1)
    Touch.objects.filter(pk=row.task_id).update(reserved_at=held)
    message = retry(operator, admin_url, row, name)
    row.refresh_from_db()
    new_id = row.retried_as
    deliver([new_id])
    assert Touch.objects.get(pk=new_id).attempt == 0  # it waits for the time to undo
    assert undo(operator, message) == f"Undone: {'Retry' if name == 'retry' else 'Send again as new'}."
    row.refresh_from_db()
    assert (row.state, row.retried_as, row.actor_name) == ("open", None, "")
    assert not Touch.objects.filter(pk=new_id).exists()
    assert Touch.objects.get(pk=row.task_id).reserved_at == held, "its slot under the cap"
    assert str(retry(operator, admin_url, row)) == "Done: Retry."


def test_retry_is_not_undone_after_it_started(failed: Callable[..., Any], operator: Client, admin_url: Url) -> None:
    row = failed()
    message = retry(operator, admin_url, row)
    row.refresh_from_db()
    sql.execute("UPDATE scheduling_touch SET due_at = now() WHERE task_id = %(id)s", {"id": row.retried_as})
    deliver([row.retried_as])
    assert undo(operator, message) == "Not undone: the retry has started already"
    row.refresh_from_db()
    assert row.state == "retried"


def test_retried_selection_is_undone(failed: Callable[..., Any], operator: Client, admin_url: Url) -> None:
    rows = [failed(user) for user in ("ann", "bob")]
    message = act(
        operator, admin_url("failedtask_changelist"), action="bulk_retry", confirmed="1", reason="r",
        _selected_action=[str(row.pk) for row in rows],
    )  # fmt: skip
    assert str(message) == "Retry: 2 failed tasks."
    assert undo(operator, message) == "Undone for 2 rows."
    assert not Touch.objects.filter(retry_of__isnull=False).exists()
    assert {each.state for each in FailedTask.objects.all()} == {"open"}


# --- bulk actions -----------------------------------------------------------------------------------------------------


def test_undone_start_of_a_bulk_action_changes_no_row(waiting: list[UUID], operator: Client, admin_url: Url) -> None:
    def start() -> Any:
        return act(operator, admin_url("touch_matching", "cancel"), reason="r", per_second="50")

    message = start()
    assert str(message) == "Cancel waiting touches: the first batch starts in ten seconds."
    bulk_actions.continue_bulk_actions()
    assert undo(operator, message) == "Undone: Cancel waiting touches."
    BulkAction.objects.update(next_at=now())
    bulk_actions.continue_bulk_actions()
    assert set(Touch.objects.values_list("state", flat=True)) == {"scheduled"}
    message = start()
    BulkAction.objects.update(next_at=now())
    bulk_actions.continue_bulk_actions()
    assert undo(operator, message) == "Not undone: the bulk action has started already; stop it on its page"


# --- configuration ----------------------------------------------------------------------------------------------------


def switch_off(client: Client, admin_url: Url, node: Node) -> Any:
    return act(client, admin_url("node_place", node.pk), stage=node.stage_id, enabled="False", confirmed="1")


def test_undone_switch_off_plans_suppressed_touches_again(waiting: list[UUID], editor: Client, admin_url: Url) -> None:
    node = Node.objects.get()
    message = switch_off(editor, admin_url, node)
    sql.execute("UPDATE scheduling_touch SET due_at = now() WHERE task_id = %(id)s", {"id": waiting[0]})
    deliver([waiting[0]])
    assert Touch.objects.get(pk=waiting[0]).reason == "node_disabled"
    assert undo(editor, message) == f"Undone: {node}."
    node.refresh_from_db()
    assert node.enabled
    assert Touch.objects.get(retry_of=waiting[0]).state == "scheduled"
    assert node.history.first().history_user.get_username() == "editor"  # type: ignore[union-attr]


def test_undone_switch_off_reports_touches_that_stay_suppressed(
    waiting: list[UUID], record_event: RecordEvent, editor: Client, admin_url: Url
) -> None:
    node = Node.objects.get()
    message = switch_off(editor, admin_url, node)
    sql.execute("UPDATE scheduling_touch SET due_at = now()", {})
    deliver(waiting)
    record_event("order.paid", "bob")
    told = undo(editor, message)
    assert "Not undone for all: an event of the customer has arrived since" in told
    assert "Not undone for all: touches that stay suppressed: 1" in told
    assert [each.retry_of for each in Touch.objects.exclude(retry_of=None)] == waiting[:1]


def test_act_on_too_many_rows_has_no_undo(
    waiting: list[UUID], operator: Client, admin_url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduling.operations.undo.MOST_ROWS", 1)
    message = act(operator, admin_url("touch_changelist"), action="cancel_selected", _selected_action=waiting)
    assert (str(message), message.extra_tags) == ("2 touches were cancelled.", "")


def test_switch_off_is_not_undone_after_another_edit(matrix: MatrixBuilder, editor: Client, admin_url: Url) -> None:
    node = matrix.node(enabled=True)
    message = switch_off(editor, admin_url, node)
    edited = Node.objects.get()
    edited.priority = 0
    edited.save()
    assert undo(editor, message) == "Not undone: the node changed since it was switched off"
    assert not Node.objects.get().enabled


def test_message_of_an_edit_leads_to_the_values_before_it(
    matrix: MatrixBuilder, editor: Client, admin_url: Url, fill_form: FillForm, save_form: SaveForm
) -> None:
    node = matrix.node(enabled=True)
    url = admin_url("node_change", node.pk)
    page = editor.post(url, fill_form(url, enabled=None), follow=True)
    (message,) = page.context["messages"]
    assert message.extra_tags in page.content.decode()
    assert not Node.objects.get().enabled
    save_form(message.extra_tags)
    assert Node.objects.get().enabled


def test_refresh_of_another_tab_leaves_the_message_to_the_page_of_the_act(
    matrix: MatrixBuilder, operator: Client, admin_url: Url
) -> None:
    """Its poll arrives between the answer of the act and the page that follows."""
    answer = operator.post(admin_url("pause_add"), {"scope": "all", "reason": "r"})
    polled = operator.get(reverse("admin:index"), headers={"x-live": "1"})
    assert "at-undo" not in polled.content.decode()
    assert "at-undo" in operator.get(answer["Location"]).content.decode()
