"""A secret without its key on this node: it is reported, it stays, and nothing else fails."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client

from scheduling.configuration import snapshot
from scheduling.configuration.file.sections import sections
from scheduling.models import AlertReceiver, ChannelConfig, Community, Touch, WebhookSubscription
from scheduling.models.encrypted import Unreadable
from tests.scheduling.admin.conftest import FormErrors, SaveForm, Url
from tests.scheduling.core.conftest import deliver
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)

TOLD = "Secrets cannot be decrypted here"
OURS = {"url": "https://example.com/in?token=hush"}


def break_secret(table: str = "channelconfig", column: str = "config", key: str = "ops") -> None:
    name = {"channelconfig": "key", "community": "chat_id"}[table]
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE scheduling_{table} SET {column} = 'gibberish' WHERE {name} = %s", [key])
    snapshot._snapshot = None


def stored(table: str = "channelconfig", column: str = "config") -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT min({column}) FROM scheduling_{table}")
        return str(cursor.fetchone()[0])


@pytest.fixture
def hook() -> ChannelConfig:
    return ChannelConfig.objects.create(key="ops", kind="webhook", config=OURS)


@pytest.fixture
def community_row() -> Community:
    return Community.objects.create(chat_id="c1", name="Chat One", targets={"wecom": OURS})


def test_alert_receiver_unreadable_is_edited_and_tests_are_not_sent(
    hook: ChannelConfig, matrix: MatrixBuilder, editor: Client, admin_url: Url, save_form: SaveForm
) -> None:
    row = AlertReceiver.objects.create(pk=1, channel=hook)
    template = matrix.template("guide")
    break_secret()
    save_form(admin_url("alertreceiver_change", row.pk), enabled=None)
    row.refresh_from_db()
    assert not row.enabled
    page = editor.post(admin_url("alertreceiver_send_test", row.pk)).content.decode()
    assert ("Not delivered" in page, "Secrets cannot be decrypted" in page) == (True, True)
    page = editor.post(admin_url("template_send_test", template.pk), {"channel": hook.pk}).content.decode()
    assert ("Not sent" in page, TOLD in page) == (True, True)


def test_channel_unreadable_is_edited_and_secret_kept_until_a_complete_new_one(
    hook: ChannelConfig, editor: Client, admin_url: Url, save_form: SaveForm, list_form_errors: FormErrors
) -> None:
    break_secret()
    assert TOLD in editor.get(admin_url("channelconfig_changelist")).content.decode()
    url = admin_url("channelconfig_change", hook.pk)
    assert "cannot be decrypted on this server" in editor.get(url).content.decode()
    save_form(url, timeout="5s")
    for verb in ("retire", "bring_back"):
        assert editor.post(admin_url(f"channelconfig_{verb}", hook.pk)).status_code == 302
    hook.refresh_from_db()
    assert (hook.timeout.total_seconds(), stored(), hook.version) == (5, "gibberish", 4)
    (errors,) = list_form_errors(url, {"secret_secret": "whsec_" + "Y" * 32})
    assert list(errors) == ["secret_url"], "half of a secret is none"
    save_form(url, secret_url="https://example.org/new")
    hook.refresh_from_db()
    assert hook.config == {"url": "https://example.org/new"}


def test_community_unreadable_is_edited_and_targets_kept(
    community_row: Community, editor: Client, admin_url: Url, save_form: SaveForm
) -> None:
    break_secret("community", "targets", "c1")
    assert TOLD in editor.get(admin_url("community_changelist")).content.decode()
    url = admin_url("community_change", community_row.pk)
    assert "cannot be decrypted on this server" in editor.get(url).content.decode()
    save_form(url, name="Chat Two")
    community_row.refresh_from_db()
    assert (community_row.name, stored("community", "targets")) == ("Chat Two", "gibberish")
    robot = "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=1"
    save_form(url, target_wecom_url=robot)
    community_row.refresh_from_db()
    assert community_row.targets == {"wecom": {"url": robot}}


def test_touches_of_other_channels_are_delivered(
    matrix: MatrixBuilder, record_event: RecordEvent, hook: ChannelConfig
) -> None:
    """Events are taken in as well: what they plan does not depend on any secret."""
    matrix.node("open")
    matrix.node("shut", channel=hook)
    break_secret()
    deliver(record_event().task_ids)
    assert dict(Touch.objects.values_list("node__key", "state")) == {"open": "delivered", "shut": "scheduled"}
    assert Touch.objects.get(node__key="shut").reason == "secrets_unreadable"


def test_export_config_unreadable_names_row_and_keeps_file(hook: ChannelConfig, tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_text("old", "utf-8")
    break_secret()
    with pytest.raises(CommandError, match=r"channel “ops”: none of the keys can read .* nothing was written"):
        call_command("export_config", str(file))
    assert file.read_text("utf-8") == "old"


def test_export_of_a_webhook_or_channel_of_unknown_kind_marks_no_unreadable_secret(hook: ChannelConfig) -> None:
    """The mark would be a setting of the name `config`."""
    WebhookSubscription.objects.create(key="crm", config=OURS, events=["job.ended"])
    break_secret()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE scheduling_webhooksubscription SET config = 'x'")
    for name in ("webhooks", "channels"):
        ChannelConfig.objects.update(kind="gone")
        with pytest.raises(Unreadable):
            sections()[name].export(with_secrets=False)


def test_apply_config_unreadable_needs_a_new_secret(hook: ChannelConfig, tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_text('channels: [{key: ops, kind: webhook, url: "(kept)"}]', "utf-8")
    break_secret()
    with pytest.raises(CommandError, match=r"channels\[0\]\.url: what is stored cannot be read here"):
        call_command("apply_config", str(file), stdout=StringIO())
    file.write_text('channels: [{key: ops, kind: email, url: "(kept)"}]', "utf-8")
    with pytest.raises(CommandError, match=r"channels\[0\]\.url: there is nothing stored to keep"):
        call_command("apply_config", str(file), stdout=StringIO())
    file.write_text(f"channels: [{{key: ops, kind: webhook, url: '{OURS['url']}'}}]", "utf-8")
    said = StringIO()
    call_command("apply_config", str(file), stdout=said)
    assert "(unreadable)" in said.getvalue()
    assert "hush" not in said.getvalue()
    hook.refresh_from_db()
    assert hook.config == OURS


def test_apply_config_replaces_unreadable_targets(community_row: Community, tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    robot = "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=1"
    file.write_text(f'communities: [{{chat_id: c1, name: Chat One, targets: {{wecom: {{url: "{robot}"}}}}}}]', "utf-8")
    break_secret("community", "targets", "c1")
    with pytest.raises(CommandError, match="community “c1”: none of the keys"):
        call_command("export_config", stdout=StringIO())
    call_command("apply_config", str(file), stdout=StringIO())
    community_row.refresh_from_db()
    assert community_row.targets == {"wecom": {"url": robot}}


def test_check_and_replay_work_with_unreadable_secret(hook: ChannelConfig, editor: Client, admin_url: Url) -> None:
    break_secret()
    call_command("check", databases=["default"], stdout=StringIO(), stderr=StringIO())
    assert editor.get(admin_url("configdraft_add")).status_code == 200
    with pytest.raises(Unreadable):  # never a dump in which it is nothing
        call_command("dumpdata", "scheduling.channelconfig", traceback=True, stdout=StringIO())
