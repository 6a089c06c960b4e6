"""The alert receiver in the back office: created, tested and shown."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.test import Client
from django.utils.timezone import now

from scheduling.channels.webhook import Webhook
from scheduling.models import Alert, AlertReceiver, ChannelConfig, Community
from scheduling.monitoring import alerts
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


@pytest.mark.parametrize("broken", ["__init__", "target_key", "row"])
def test_defect_of_a_channel_is_named_and_ends_no_pass(
    alert_receiver: AlertReceiver, list_form_errors: FormErrors, admin_url: Url, monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:  # fmt: skip
    def fail(*_: Any) -> None:
        raise KeyError("a bug")

    if broken == "row":  # a delay that no form and no file takes
        ChannelConfig.objects.update(retry_delays=["soon"])
    else:
        monkeypatch.setattr(Webhook, broken, fail)
    monkeypatch.setattr(alerts, "CONDITIONS", ())
    Alert.objects.create(condition="unattended", since=now(), value=1, message_at=now(), tried=True)
    alerts.evaluate_alerts(now())
    alert_receiver.refresh_from_db()
    assert re.match("channel_error (KeyError: 'a bug'|TypeError: .*str)", alert_receiver.problem)
    assert Alert.objects.get().notified_at is None
    (errors,) = list_form_errors(admin_url("alertreceiver_change", alert_receiver.pk), {})
    assert [(field, "Error in the channel's code" in text) for field, text in errors.items()] == [("community", True)]
