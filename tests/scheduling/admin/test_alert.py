"""The alert receiver in the back office: created, tested and shown."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.test import Client
from django.utils.timezone import now

from scheduling.models import Alert, AlertReceiver, ChannelConfig, Community
from tests.scheduling.admin.conftest import Receiver

pytestmark = pytest.mark.django_db

Url = Callable[..., str]


@pytest.fixture
def hook(receiver: Receiver) -> ChannelConfig:
    return ChannelConfig.objects.create(key="ops", kind="webhook", config={"url": receiver.url})


@pytest.fixture
def alert_receiver(hook: ChannelConfig) -> AlertReceiver:
    return AlertReceiver.objects.create(pk=1, channel=hook)


def test_alert_receiver_without_address_is_refused(
    editor: Client, admin_url: Url, fill_form: Callable[..., dict[str, Any]]
) -> None:
    robot = ChannelConfig.objects.create(key="robot", kind="wecom")
    mail = ChannelConfig.objects.create(key="mail", kind="email")
    log = ChannelConfig.objects.create(key="log", kind="log")
    empty = Community.objects.create(chat_id="c1")
    url = admin_url("alertreceiver_add")
    for channel, community, field in (
        (robot, None, "community"), (robot, empty, "community"), (mail, None, "address"), (log, None, "channel"),
    ):  # fmt: skip
        given = {"channel": channel.pk, "community": community.pk if community else None}
        answer = editor.post(url, fill_form(url, **given))
        assert list(answer.context["adminform"].form.errors) == [field], channel
    assert not AlertReceiver.objects.exists()


def test_test_alert_is_delivered(
    alert_receiver: AlertReceiver, editor: Client, admin_url: Url, receiver: Receiver, valkey: redis.Redis
) -> None:
    url = admin_url("alertreceiver_send_test", alert_receiver.pk)
    assert editor.get(url).status_code == 200
    assert receiver.bodies == []
    assert "Delivered" in editor.post(url).content.decode()
    assert receiver.bodies[0]["data"]["body"].startswith("[Test] Alerts\n")


def test_open_alerts_and_problems_are_shown(alert_receiver: AlertReceiver, viewer: Client, admin_url: Url) -> None:
    Alert.objects.create(condition="unattended", subject="touch.high", since=now(), value=1, message_at=now())
    AlertReceiver.objects.update(problem="vendor_93000 机器人地址不合法")
    page = viewer.get(admin_url("alertreceiver_changelist"), follow=True).content.decode()
    assert "No worker consumes touch.high" in page
    assert "Platform refused it (code 93000) – 机器人地址不合法" in page


def test_saved_receiver_gets_unsent_alerts_at_once(
    alert_receiver: AlertReceiver, editor: Client, admin_url: Url, fill_form: Callable[..., dict[str, Any]]
) -> None:
    later = now() + timedelta(minutes=10)
    Alert.objects.create(condition="unattended", since=now(), value=1, message_at=later, tried=True)
    AlertReceiver.objects.update(problem="connect")
    url = admin_url("alertreceiver_change", alert_receiver.pk)
    assert editor.post(url, fill_form(url)).status_code == 302
    alert_receiver.refresh_from_db()
    assert alert_receiver.problem == ""
    assert Alert.objects.get().message_at < later
