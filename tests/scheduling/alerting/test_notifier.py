"""Passes with a pushed clock, a real robot, real figures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError, connection
from django.utils.timezone import now
from kombu import Connection

from config.celery.application import app
from scheduling.channels.quota import QuotaGate, name_quota_keys, receiver_key
from scheduling.models import Alert, AlertReceiver, ChannelConfig, Community, Pause
from scheduling.monitoring.alerting import conditions, messages, notifier
from scheduling.monitoring.alerting.alert_actions import AlertAction, create_alert
from scheduling.monitoring.alerting.conditions import get_default_limits, load_conditions
from scheduling.monitoring.alerting.notifier import AlertEvaluator
from scheduling.redis_client import connect_redis
from tests.scheduling.alerting.conftest import BEGAN, Robot

pytestmark = pytest.mark.django_db
SECOND = timedelta(seconds=1)
FULL = {"errcode": 45009, "errmsg": "api freq out of limit"}
CreateAlertReceiver = Callable[..., AlertReceiver]
CreateOldPause = Callable[..., Pause]


def evaluate_at(seconds: float, watching: AlertEvaluator | None = None) -> None:
    """By default as after a restart: what is known is in the database."""
    (watching or AlertEvaluator()).evaluate(BEGAN + seconds * SECOND)


def test_fire_reminder_and_end_are_one_message_each(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, create_old_pause: CreateOldPause
) -> None:
    create_alert_receiver()
    pause = create_old_pause()
    for seconds in (0, 10, 50):
        evaluate_at(seconds)
    assert robot.taken == []
    for seconds in (60, 70, 80, 3650):
        evaluate_at(seconds)
    (told,) = robot.taken
    assert told.splitlines() == [
        "【告警】有暂停持续太久（全部）", "自 11-21 16:00:00 起，已持续 1 分钟。", "最久的：2 天。",
        "请确认是否仍需暂停。被暂停的触达会过期。", "https://touch.example.com/admin/scheduling/pause/",
    ]  # fmt: skip
    for seconds in (3660, 3670, 7000):
        evaluate_at(seconds)
    assert [each.splitlines()[0] for each in robot.taken[1:]] == ["【仍未恢复】有暂停持续太久（全部）"]
    pause.delete()
    for seconds in (7010, 7060, 7070, 7080, 9000):
        evaluate_at(seconds)
    end = "自 11-21 16:00:00 至 11-21 17:56:50，共 1 小时 56 分钟。"
    assert robot.taken[2:] == [f"【已恢复】有暂停持续太久（全部）\n{end}"]
    assert not Alert.objects.exists()


def test_simultaneous_alerts_are_one_message(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, create_old_pause: CreateOldPause
) -> None:
    create_alert_receiver(limits={"paused": 3600, "no_watcher": 1}, holds_for=timedelta(0))
    create_old_pause("channel:a")
    create_old_pause("node:b")
    evaluate_at(0)
    (told,) = robot.taken
    assert [part.splitlines()[0] for part in told.split("\n\n")] == [
        "【告警】有暂停持续太久（某个渠道、某个节点）", "【告警】没有进程在监听在线会话",
    ]  # fmt: skip


def test_refused_message_is_repeated_later(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, create_old_pause: CreateOldPause
) -> None:
    receiver = create_alert_receiver(holds_for=timedelta(0))
    create_old_pause()
    robot.verdicts = [{"errcode": -1, "errmsg": "busy"}, FULL]
    evaluate_at(0)
    evaluate_at(10)
    assert len(robot.asked) == 1, "it was asked again before the time that it names"
    receiver.refresh_from_db()
    assert (receiver.tries, receiver.notified_at) == (1, None)
    assert receiver.problem.startswith("vendor_-1 企业微信系统繁忙")
    clear_quota(receiver, robot)
    evaluate_at(20)
    evaluate_at(40)
    assert (len(robot.asked), robot.taken) == (2, [])
    clear_quota(receiver, robot)
    evaluate_at(90)
    evaluate_at(100)
    assert (len(robot.asked), len(robot.taken)) == (3, 1)
    receiver.refresh_from_db()
    assert (receiver.tries, receiver.retry_at, receiver.problem) == (0, None, "")


def slot(receiver: AlertReceiver, robot: Robot) -> str:
    message: Any = type("Message", (), {"target": {"url": robot.url}})
    return receiver_key(messages.resolve_route(receiver).channel, message)


def clear_quota(receiver: AlertReceiver, robot: Robot) -> None:
    """The time that the vendor named is over."""
    for name in name_quota_keys(slot(receiver, robot)):
        connect_redis(settings.REDIS_URL).delete(name)


def test_quota_exhausted_robot_is_not_called(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, create_old_pause: CreateOldPause
) -> None:
    """The vendor counts all messages, whatever process sent them."""
    receiver = create_alert_receiver(holds_for=timedelta(0))
    create_old_pause()
    used = slot(receiver, robot)
    quotas = messages.resolve_route(receiver).channel.quotas
    assert messages.get_alert_quota().acquire(quotas, {used: 20})[used].granted == 20
    evaluate_at(0)
    receiver.refresh_from_db()
    assert (robot.asked, receiver.problem) == ([], "quota")


def test_restart_repeats_no_message(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, create_old_pause: CreateOldPause
) -> None:
    create_alert_receiver(holds_for=timedelta(0))
    create_old_pause()
    for seconds in (0, 10, 20):
        AlertEvaluator().evaluate(BEGAN + seconds * SECOND)
    assert len(robot.taken) == 1


@pytest.mark.django_db(transaction=True)
def test_concurrent_passes_send_one_message(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, create_old_pause: CreateOldPause
) -> None:
    create_alert_receiver(holds_for=timedelta(0))
    create_old_pause()
    robot.may_answer.clear()

    def first() -> None:
        evaluate_at(0)
        connection.close()

    running = threading.Thread(target=first)
    running.start()
    assert robot.waits.wait(60)
    evaluate_at(600)  # while the first one waits for the robot's response; it started long ago
    robot.may_answer.set()
    running.join()
    evaluate_at(610)
    assert len(robot.asked) == 1


def test_crash_after_send_repeats_with_same_key(
    robot: Robot,
    create_alert_receiver: CreateAlertReceiver,
    create_old_pause: CreateOldPause,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At least once. A receiver that honours the key sees one effect."""
    config = {"url": robot.url}
    hook = ChannelConfig.objects.create(key="hook", kind="webhook", config=config, timeout=timedelta(seconds=80))
    create_alert_receiver(channel=hook, community=None, holds_for=timedelta(0))
    create_old_pause()
    with monkeypatch.context() as dying:
        dying.setattr(notifier, "store_notification_result", lambda *_: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            evaluate_at(0)
    evaluate_at(60)
    assert len(robot.asked) == 1, "somebody else had it still"
    AlertReceiver.objects.update(watched_until=now())
    evaluate_at(70)
    evaluate_at(80)
    assert len(robot.asked) == 2
    first, second = (each["webhook-id"] for each in robot.headers)
    assert first == second


def test_receiver_without_target_does_not_block_others(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, create_old_pause: CreateOldPause
) -> None:
    lost = create_alert_receiver("a", community=None, holds_for=timedelta(0))
    create_alert_receiver("b", holds_for=timedelta(0))
    create_old_pause()
    evaluate_at(0)
    lost.refresh_from_db()
    assert lost.problem.startswith("no_target")
    assert len(robot.taken) == 1


def test_receiver_unreadable_reports_until_repaired(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, create_old_pause: CreateOldPause
) -> None:
    place = Community.objects.create(chat_id="lost", targets={"ops": {"url": robot.url}})
    lost = create_alert_receiver("a", community=place, holds_for=timedelta(0))
    create_alert_receiver("b", holds_for=timedelta(0))
    create_old_pause()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE scheduling_community SET targets = 'gibberish' WHERE id = %s", [place.pk])
    evaluate_at(0)
    lost.refresh_from_db()
    assert lost.problem == "internal_error Unreadable none of the keys can read scheduling.Community.targets"
    assert len(robot.taken) == 1
    place.save()
    evaluate_at(10)
    lost.refresh_from_db()
    assert (lost.problem, len(robot.taken)) == ("", 2)


def test_failing_pass_releases_the_lease(
    create_alert_receiver: CreateAlertReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = create_alert_receiver()
    with monkeypatch.context() as breaking:
        breaking.setattr(messages, "resolve_route", lambda _: (_ for _ in ()).throw(KeyError("a bug")))
        evaluate_at(0)
    receiver.refresh_from_db()
    assert (receiver.problem, receiver.watched_until) == ("internal_error KeyError 'a bug'", None)
    evaluate_at(10)
    receiver.refresh_from_db()
    assert receiver.problem == "", "there is nothing to tell, and it could be told"


def test_receiver_disabled_or_below_limits_gets_nothing(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, create_old_pause: CreateOldPause
) -> None:
    create_alert_receiver("a", enabled=False, holds_for=timedelta(0))
    create_alert_receiver("b", limits={}, holds_for=timedelta(0))
    create_alert_receiver("c", limits={"paused": 86400 * 3, "gone": 1}, holds_for=timedelta(0))
    create_old_pause()
    evaluate_at(0)
    assert robot.asked == []


def test_broker_outage_is_reported_without_broker(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_alert_receiver(limits={"broker": 0, "queue_length": 0, "unattended": 0}, holds_for=timedelta(0))
    monkeypatch.setattr(app, "connection_for_read", lambda **options: Connection("redis://127.0.0.1:1/0", **options))
    monkeypatch.setattr(messages, "get_alert_quota", lambda: QuotaGate.connect("redis://127.0.0.1:1/0"))
    evaluate_at(0)
    (told,) = robot.taken
    assert told.startswith("【告警】消息中间件没有响应\n")
    assert "\n\n" not in told, "what nobody knows is not told"


@pytest.mark.django_db(transaction=True)
def test_database_outage_is_reported_once_from_memory(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_alert_receiver(limits={"database": 0}, holds_for=timedelta(seconds=30))
    create_alert_receiver("b", limits={"paused": 60}, holds_for=timedelta(0))
    watching = AlertEvaluator()
    evaluate_at(0, watching)

    def away(*_: Any) -> Any:
        raise OperationalError("the database is away")

    with monkeypatch.context() as outage:
        outage.setattr(AlertEvaluator, "evaluate_receivers", away)
        for seconds in (10, 20, 40, 50, 60):
            evaluate_at(seconds, watching)
    (told,) = robot.taken
    assert told.startswith("【告警】PostgreSQL 没有及时响应\n自 11-21 16:00:10 起，已持续 30 秒。\n")
    for seconds in (70, 80, 100, 110):
        evaluate_at(seconds, watching)
    assert [each.splitlines()[0] for each in robot.taken[1:]] == ["【已恢复】PostgreSQL 没有及时响应"]


@pytest.mark.django_db(transaction=True)
def test_flapping_database_is_reported_once(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One evaluation in six reaches it. Neither that nor earlier messages restart the outage."""
    create_alert_receiver(limits={"database": 0}, holds_for=timedelta(minutes=1))
    watching = AlertEvaluator()
    evaluate_at(0, watching)
    with monkeypatch.context() as outage:
        really = AlertEvaluator.evaluate_receivers
        reached: list[int] = []

        def now_and_then(self: AlertEvaluator, at: Any) -> None:
            if (at - BEGAN).total_seconds() % 60:
                raise OperationalError("the database is away")
            reached.append(1)
            really(self, at)

        outage.setattr(AlertEvaluator, "evaluate_receivers", now_and_then)
        for seconds in range(10, 300, 10):
            evaluate_at(seconds, watching)
    assert len(reached) == 4
    (told,) = robot.taken
    assert told.startswith("【告警】PostgreSQL 没有及时响应\n自 11-21 16:00:10 起，已持续 1 分钟。\n")
    for seconds in (300, 310, 360, 370):
        evaluate_at(seconds, watching)
    assert [each.splitlines()[0] for each in robot.taken[1:]] == ["【已恢复】PostgreSQL 没有及时响应"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("holds_for", [0, 15])
def test_second_database_outage_is_reported_again(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, monkeypatch: pytest.MonkeyPatch, holds_for: int
) -> None:
    create_alert_receiver(limits={"database": 0}, holds_for=holds_for * SECOND)
    watching = AlertEvaluator()
    evaluate_at(0, watching)

    def away(*_: Any) -> Any:
        raise OperationalError("the database is away")

    for begin_at in (10, 100):
        with monkeypatch.context() as outage:
            outage.setattr(AlertEvaluator, "evaluate_receivers", away)
            for seconds in range(begin_at, begin_at + 30, 10):
                evaluate_at(seconds, watching)
        for seconds in range(begin_at + 30, begin_at + 60, 10):
            evaluate_at(seconds, watching)
    assert [each.splitlines()[0] for each in robot.taken] == [
        "【告警】PostgreSQL 没有及时响应", "【已恢复】PostgreSQL 没有及时响应",
    ] * 2  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_outage_of_replaced_beat_is_resolved_by_successor(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_alert_receiver(limits={"database": 0}, holds_for=timedelta(0))
    cut_off = AlertEvaluator()
    evaluate_at(0, cut_off)
    with monkeypatch.context() as outage:
        outage.setattr(AlertEvaluator, "evaluate_receivers", lambda *_: (_ for _ in ()).throw(OperationalError))
        evaluate_at(10, cut_off)
    cut_off.store_outages()
    evaluate_at(20)
    assert [each.splitlines()[0] for each in robot.taken] == [
        "【告警】PostgreSQL 没有及时响应", "【已恢复】PostgreSQL 没有及时响应",
    ]  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_stored_outage_and_successor_do_not_conflict(
    robot: Robot, create_alert_receiver: CreateAlertReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = create_alert_receiver(limits={"database": 0}, holds_for=timedelta(0))
    cut_off = AlertEvaluator()
    evaluate_at(0, cut_off)
    with monkeypatch.context() as outage:
        outage.setattr(AlertEvaluator, "evaluate_receivers", lambda *_: (_ for _ in ()).throw(OperationalError))
        evaluate_at(10, cut_off)
    robot.may_answer.clear()
    robot.waits.clear()

    def inherit() -> None:
        evaluate_at(20)
        connection.close()

    heir = threading.Thread(target=inherit)
    with monkeypatch.context() as slow:
        slow.setattr(conditions, "read_metrics", lambda _wanted: {})  # the database is too slow for the collectors
        heir.start()
        assert robot.waits.wait(60)
        cut_off.store_outages()
        robot.may_answer.set()
        heir.join()
    receiver.refresh_from_db()
    assert (receiver.problem, receiver.watched_until) == ("", None)
    evaluate_at(30)
    assert [each.splitlines()[0] for each in robot.taken] == [
        "【告警】PostgreSQL 没有及时响应", "【告警】PostgreSQL 没有及时响应", "【已恢复】PostgreSQL 没有及时响应",
    ]  # fmt: skip


def test_every_condition_has_text_and_page_link(robot: Robot) -> None:
    """In both languages, with many subjects."""
    from django.utils import translation

    says = [
        (word, create_alert(1, key, subject, 100.0, BEGAN))
        for key, condition in load_conditions().items()
        for word in (AlertAction.FIRE, AlertAction.REMIND, AlertAction.RESOLVE)
        for subject in ([f"q{number}" for number in range(20)] if condition.label else [""])
    ]
    for language in ("zh-hans", "en"):
        with translation.override(language):
            subject, body = messages.compose_message(says, BEGAN + timedelta(hours=3))
        assert "%(" not in subject + body
        assert body.count("https://touch.example.com/admin/") == 2 * len(load_conditions())
    assert set(get_default_limits()) == set(load_conditions())
