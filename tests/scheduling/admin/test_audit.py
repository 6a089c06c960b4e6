"""The audit log: each action once, in the transaction of the action, never changed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import call_command
from django.db import IntegrityError, transaction
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from scheduling import sql
from scheduling.audit import record_action
from scheduling.customers.erasure import erase_operator_texts
from scheduling.errors import Conflict
from scheduling.ids import first_id_at
from scheduling.ledger.anonymization import Identity
from scheduling.models import AuditEntry, FailedTask, Node, Stage, Touch
from scheduling.operations import commands, failed_tasks, retention
from scheduling.operations.failed_tasks import Actor
from tests.scheduling.admin.conftest import SaveForm, Url
from tests.support.matrix import MatrixBuilder, RecordEvent
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db


def test_edit_of_a_node_records_values_reason_and_address(
    matrix: MatrixBuilder, admin_url: Url, save_form: SaveForm
) -> None:
    node = matrix.node(delay=timedelta(minutes=15))
    save_form(admin_url("node_change", node.pk), delay="30m", change_reason="too early")
    row = AuditEntry.objects.filter(actor="editor", action="changed").get()
    assert (row.kind, row.object_id, row.label, row.reason) == ("scheduling.node", str(node.pk), "guide", "too early")
    assert (row.address, row.changes) == ("127.0.0.1", [["delay", "0:15:00", "0:30:00"]])


def test_rolled_back_edit_leaves_no_entry(matrix: MatrixBuilder) -> None:
    node = matrix.node()
    before = AuditEntry.objects.count()
    node.enabled = False
    with transaction.atomic():
        node.save()
        transaction.set_rollback(True)
    assert AuditEntry.objects.count() == before
    assert Node.objects.get().enabled


def test_acts_of_operators_and_clients_are_recorded_once(
    matrix: MatrixBuilder, record_event: RecordEvent, operator: Client, admin_url: Url
) -> None:
    matrix.node(delay=timedelta(hours=1))
    record_event()
    commands.cancel_one_touch(Touch.objects.get().pk, actor="api:shop")
    for reason in ("wrong text", "again"):
        operator.post(admin_url("pause_add"), {"scope": "all", "reason": reason})
    operator.post(f"{admin_url('pause_end')}?scope=all")
    row = FailedTask.objects.create(origin="broker", failure="failed", reason="unreadable")
    failed_tasks.ignore_failed_task(row.pk, Actor("olga", reason="old format"))
    with pytest.raises(Conflict):
        failed_tasks.ignore_failed_task(row.pk, Actor("otto"))
    found = AuditEntry.objects.filter(action__in=["cancelled", "paused", "resumed", "ignored"]).order_by("pk")
    assert [(each.actor, each.action, each.kind, each.reason) for each in found] == [
        ("api:shop", "cancelled", "scheduling.touch", ""), ("operator", "paused", "scheduling.pause", "wrong text"),
        ("operator", "resumed", "scheduling.pause", ""), ("olga", "ignored", "scheduling.failedtask", "old format"),
    ]  # fmt: skip


def test_sign_ins_are_recorded_and_unknown_names_are_not(administrator: Client, settings: Settings) -> None:
    User.objects.create_user("olga", password="Kx7-longer-one", is_staff=True)
    settings.AFTERTOUCH_LOGIN_TRIES = 3
    client, login = Client(), reverse("admin:login")
    for name in ("olga", "hunter2"):
        client.post(login, {"username": name, "password": "wrong"})
    client.post(login, {"username": "olga", "password": "Kx7-longer-one"})
    client.post(reverse("admin:logout"))
    found = AuditEntry.objects.filter(label="olga").order_by("pk")
    assert [row.action for row in found] == ["login_failed", "logged_in", "logged_out"]
    assert not AuditEntry.objects.filter(label__contains="hunter2").exists()
    for _ in range(9):
        client.post(login, {"username": "olga", "password": "wrong"})
    assert AuditEntry.objects.filter(label="olga", action="login_failed").count() == 1 + settings.AFTERTOUCH_LOGIN_TRIES


def test_entry_hides_secrets(db: None) -> None:
    record_action("changed", ("scheduling.node", 1), actor="olga", changes=[("token", "abc", "abcdef-long")],
                  reason="call 13812345678")  # fmt: skip
    row = AuditEntry.objects.get()
    assert row.changes == [["token", "****", "****"]]
    assert "13812345678" not in row.reason


def test_postgresql_refuses_changes_within_a_year(db: None) -> None:
    record_action("acted", ("scheduling.node", 1), actor="olga")
    refused = (
        "UPDATE scheduling_auditentry SET actor = 'otto'", "UPDATE scheduling_auditentry SET reason = 'other'",
        "DELETE FROM scheduling_auditentry",
    )  # fmt: skip
    for statement in refused:
        with pytest.raises(IntegrityError, match="not changed or deleted"), transaction.atomic():
            sql.execute(statement, {})
    assert AuditEntry.objects.get().actor == "olga"


def test_erasure_empties_texts_that_name_the_customer(db: None) -> None:
    record_action("ignored", ("scheduling.failedtask", 1), actor="olga", reason="ann-7731 asked")
    record_action("acted", ("scheduling.node", 1), label="ann-7731", actor="olga", changes=[("k", "", "ann-7731")])
    record_action("acted", ("scheduling.node", 2), actor="olga", reason="other")
    assert erase_operator_texts(Identity("ann-7731")) == 3
    texts = AuditEntry.objects.order_by("pk").values_list("label", "reason", "changes")
    assert list(texts) == [("", "", []), ("", "", []), ("", "other", [])]


def test_retention_deletes_entries_after_a_year(db: None) -> None:
    for days in (366 + 1, 300):
        at = sql.now() - timedelta(days=days)
        AuditEntry.objects.create(id=first_id_at(at), at=at, actor=str(days), action="acted", kind="x", object_id="1")
    assert retention.delete_expired_rows()["scheduling_auditentry"] == 1
    assert AuditEntry.objects.get().actor == "300"


def test_page_searches_filters_links_names_and_exports(
    matrix: MatrixBuilder, administrator: Client, admin_url: Url
) -> None:
    node = matrix.node()
    record_action("changed", node, label="guide", actor="olga", changes=[("delay", "1h", "2h")])
    for action in AuditEntry.Action.values:
        record_action(action, ("scheduling.node", 1), actor="otto")
    text = administrator.get(admin_url("auditentry_changelist"), {"q": "olga"}).content.decode()
    assert "delay: 1h → 2h" in text
    assert admin_url("node_change", node.pk) in text
    answer: Any = administrator.get(admin_url("auditentry_export", "csv"), {"q": "guide"})
    assert "delay: 1h → 2h" in b"".join(answer.streaming_content).decode()
    text = "".join(administrator.get(admin_url("auditentry_changelist"), {"q": "otto"}).content.decode().split())
    assert [action for action in AuditEntry.Action.values if f">{action}<" in text] == []
    assert [label for label in AuditEntry.Action.labels if f">{''.join(label.split())}<" not in text] == []
    entry = AuditEntry.objects.get(actor="otto", action="erased")
    text = administrator.get(admin_url("auditentry_change", entry.pk)).content.decode()
    assert f">{entry.get_action_display()}<" in text
    found = read_context(administrator, admin_url("auditentry_changelist"), {"action__exact": "exported"})
    assert [row.actor for row in found["cl"].result_list] == ["admin", "otto"], "and the export of this page"


def test_configuration_file_is_recorded_for_the_system(matrix: MatrixBuilder, tmp_path: Any) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text("version: 1\nstages: [{key: presale, name: 售前}]\n", encoding="utf-8")
    call_command("apply_config", str(path), verbosity=0)
    row = AuditEntry.objects.get(action="published")
    assert (row.actor, row.kind, row.changes) == (
        "", "scheduling.configuration", [["stages presale", None, "changed"]],
    )  # fmt: skip


def test_deletion_is_recorded_once_for_each_row(administrator: Client, admin_url: Url) -> None:
    """Django stores the entries of several rows without a signal."""
    groups = [Group.objects.create(name=name).pk for name in ("east", "west")]
    chosen = {"action": "delete_selected", "_selected_action": groups, "post": "yes"}
    assert administrator.post(reverse("admin:auth_group_changelist"), chosen).status_code == 302
    stage = Stage.objects.create(key="spare", name="Spare", position=9)
    administrator.post(admin_url("stage_delete", stage.pk), {"post": "yes"})
    assert not Stage.objects.exists()
    found = AuditEntry.objects.filter(kind__in=["auth.group", "scheduling.stage"], actor="admin").order_by("pk")
    assert [(each.action, each.label) for each in found] == [
        ("deleted", "east"), ("deleted", "west"), ("deleted", "Spare"),
    ]  # fmt: skip
