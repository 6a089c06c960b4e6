"""The alert receiver in the back office: created, tested and shown."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis
from django.test import Client
from django.utils.timezone import now

from scheduling.models import Alert, AlertReceiver, ChannelConfig, Community
from tests.scheduling.admin.conftest import FormErrors, SaveForm, Url
from tests.scheduling.core.receivers import ScriptedReceiver

pytestmark = pytest.mark.django_db


@pytest.fixture
def hook(receiver: ScriptedReceiver) -> ChannelConfig:
    return ChannelConfig.objects.create(key="ops", kind="webhook", config={"url": receiver.url})


@pytest.fixture
def alert_receiver(hook: ChannelConfig) -> AlertReceiver:
    return AlertReceiver.objects.create(pk=1, channel=hook)


def test_alert_receiver_without_address_is_refused(list_form_errors: FormErrors, admin_url: Url) -> None:
    robot, mail, log = (
        ChannelConfig.objects.create(key=kind, kind=kind).pk for kind in ("wecom", "email", "log")
    )  # fmt: skip
    empty = Community.objects.create(chat_id="c1").pk
    errors = list_form_errors(
        admin_url("alertreceiver_add"), {"channel": robot}, {"channel": robot, "community": empty}, {"channel": mail},
        {"channel": log},
    )  # fmt: skip
    assert [list(each) for each in errors] == [["community"], ["community"], ["address"], ["channel"]]
    assert not AlertReceiver.objects.exists()


def test_test_alert_is_delivered(
    alert_receiver: AlertReceiver, editor: Client, admin_url: Url, receiver: ScriptedReceiver, valkey: redis.Redis
) -> None:
    url = admin_url("alertreceiver_send_test", alert_receiver.pk)
    assert editor.get(url).status_code == 200
    assert receiver.calls == []
    assert "Delivered" in editor.post(url).content.decode()
    assert receiver.calls[0].json["data"]["body"].startswith("[Test] Alerts\n")


def test_open_alerts_and_problems_are_shown(alert_receiver: AlertReceiver, viewer: Client, admin_url: Url) -> None:
    Alert.objects.create(condition="unattended", subject="touch.high", since=now(), value=1, message_at=now())
    AlertReceiver.objects.update(problem="vendor_93000 机器人地址不合法")
    page = viewer.get(admin_url("alertreceiver_changelist"), follow=True).content.decode()
    assert "No worker consumes touch.high" in page
    assert "Platform refused it (code 93000) – 机器人地址不合法" in page


def test_saved_receiver_gets_unsent_alerts_at_once(
    alert_receiver: AlertReceiver, admin_url: Url, save_form: SaveForm
) -> None:
    later = now() + timedelta(minutes=10)
    Alert.objects.create(condition="unattended", since=now(), value=1, message_at=later, tried=True)
    AlertReceiver.objects.update(problem="connect")
    save_form(admin_url("alertreceiver_change", alert_receiver.pk))
    alert_receiver.refresh_from_db()
    assert alert_receiver.problem == ""
    assert Alert.objects.get().message_at < later
