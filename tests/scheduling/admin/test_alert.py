"""Alert receivers in the back office: created, tested and listed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.test import Client
from django.utils.timezone import now

from scheduling.models import Alert, AlertReceiver, ChannelConfig, Community
from scheduling.monitoring.alerting.conditions import get_default_limits
from tests.scheduling.admin.conftest import Receiver

pytestmark = pytest.mark.django_db

Url = Callable[..., str]


@pytest.fixture
def hook(receiver: Receiver) -> ChannelConfig:
    return ChannelConfig.objects.create(key="ops", kind="webhook", config={"url": receiver.url})


@pytest.fixture
def alert_receiver(hook: ChannelConfig) -> AlertReceiver:
    return AlertReceiver.objects.create(name="on duty", channel=hook, limits={"overdue": 60, "broker": 0})


def test_new_alert_receiver_has_default_limits(
    hook: ChannelConfig, editor: Client, admin_url: Url, fill_form: Callable[..., dict[str, Any]]
) -> None:
    url = admin_url("alertreceiver_add")
    answer = editor.post(url, fill_form(url, name="on duty", channel=hook.pk))
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    row = AlertReceiver.objects.get()
    assert row.limits == get_default_limits()
    assert (row.holds_for, row.remind_every) == (timedelta(minutes=1), timedelta(hours=1))


def test_alert_limits_are_parsed_and_empty_removed(
    alert_receiver: AlertReceiver, editor: Client, admin_url: Url, fill_form: Callable[..., dict[str, Any]]
) -> None:
    """A running pass keeps its fence; a failed notification is repeated at once."""
    AlertReceiver.objects.update(lease_no=7, watched_until=now(), tries=3, retry_at=now(), problem="connect")
    url = admin_url("alertreceiver_change", alert_receiver.pk)
    page = editor.get(url)
    AlertReceiver.objects.update(lease_no=8)
    changes = {"limit_overdue": "2m30s", "limit_failed_burst": "25", "limit_broker": None, "limit_unattended": "on"}
    answer = editor.post(url, fill_form(url, **changes, remind_every=""))
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    assert page.context["adminform"].form["limit_overdue"].value() == "1m"
    alert_receiver.refresh_from_db()
    assert alert_receiver.limits == {"overdue": 150, "unattended": 0, "failed_burst": 25}
    assert (alert_receiver.remind_every, alert_receiver.lease_no, alert_receiver.tries, alert_receiver.problem) == (
        None,
        8,
        0,
        "",
    )


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
        given = {"name": "on duty", "channel": channel.pk, "community": community.pk if community else None}
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
    Alert.objects.create(
        receiver=alert_receiver,
        condition="queue_age",
        subject="touch.high",
        since=now(),
        notified_at=now(),
        value=1,
        first_value=1,
    )
    assert "Alerts: 1" in viewer.get(admin_url("alertreceiver_changelist")).content.decode()
    page = viewer.get(admin_url("alertreceiver_change", alert_receiver.pk)).content.decode()
    assert "Messages wait too long in touch.high" in page
    assert "Touches are late: more than 1 minute; The broker does not answer" in page
    AlertReceiver.objects.update(problem="vendor_93000 机器人地址不合法")
    assert "Notification failed" in viewer.get(admin_url("alertreceiver_changelist")).content.decode()
    page = viewer.get(admin_url("alertreceiver_change", alert_receiver.pk)).content.decode()
    assert "Platform refused it (code 93000) – 机器人地址不合法" in page
