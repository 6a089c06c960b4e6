"""Passes with a pushed clock, a real robot, real figures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.utils.timezone import now
from kombu import Connection

from config.celery.application import app
from scheduling.channels.quota import QuotaGate, _key_names, receiver_key
from scheduling.models import Alert, AlertReceiver, ChannelConfig, Community, Pause
from scheduling.monitoring.alerting import messages, notifier, rules
from scheduling.monitoring.alerting.following import AlertAction, create_alert
from scheduling.monitoring.alerting.notifier import AlertEvaluator
from scheduling.monitoring.alerting.rules import get_default_limits, load_conditions
from tests.scheduling.alerts.conftest import BEGAN, Robot

pytestmark = pytest.mark.django_db
SECOND = timedelta(seconds=1)
FULL = {"errcode": 45009, "errmsg": "api freq out of limit"}
OnDuty = Callable[..., AlertReceiver]
Wrong = Callable[..., Pause]


def look(seconds: float, watching: AlertEvaluator | None = None) -> None:
    """By default as after a restart: what is known is in the database."""
    (watching or AlertEvaluator()).evaluate(BEGAN + seconds * SECOND)


def test_a_beginning_a_reminder_and_an_end_are_one_message_each(robot: Robot, on_duty: OnDuty, wrong: Wrong) -> None:
    on_duty()
    pause = wrong()
    for seconds in (0, 10, 50):
        look(seconds)
    assert robot.taken == []
    for seconds in (60, 70, 80, 3650):
        look(seconds)
    (told,) = robot.taken
    assert told.splitlines() == [
        "【告警】有暂停持续太久（全部）", "自 11-21 16:00:00 起，已持续 1 分钟。", "最久的：2 天。",
        "请确认是否仍需暂停。被暂停的触达会过期。", "https://touch.example.com/admin/scheduling/pause/",
    ]  # fmt: skip
    for seconds in (3660, 3670, 7000):
        look(seconds)
    assert [each.splitlines()[0] for each in robot.taken[1:]] == ["【仍未恢复】有暂停持续太久（全部）"]
    pause.delete()
    for seconds in (7010, 7060, 7070, 7080, 9000):
        look(seconds)
    end = "自 11-21 16:00:00 至 11-21 17:56:50，共 1 小时 56 分钟。"
    assert robot.taken[2:] == [f"【已恢复】有暂停持续太久（全部）\n{end}"]
    assert not Alert.objects.exists()


def test_what_begins_together_is_one_message(robot: Robot, on_duty: OnDuty, wrong: Wrong) -> None:
    on_duty(limits={"paused": 3600, "no_watcher": 1}, holds_for=timedelta(0))
    wrong("channel:a")
    wrong("node:b")
    look(0)
    (told,) = robot.taken
    assert [part.splitlines()[0] for part in told.split("\n\n")] == [
        "【告警】有暂停持续太久（某个渠道、某个节点）", "【告警】没有进程在监听在线会话",
    ]  # fmt: skip


def test_a_refusal_with_status_200_is_said_again_later(robot: Robot, on_duty: OnDuty, wrong: Wrong) -> None:
    receiver = on_duty(holds_for=timedelta(0))
    wrong()
    robot.verdicts = [{"errcode": -1, "errmsg": "busy"}, FULL]
    look(0)
    look(10)
    assert len(robot.asked) == 1, "it was asked again before the time that it names"
    receiver.refresh_from_db()
    assert (receiver.tries, receiver.told_at) == (1, None)
    assert receiver.problem.startswith("vendor_-1 企业微信系统繁忙")
    unmute(receiver, robot)
    look(20)
    look(40)
    assert (len(robot.asked), robot.taken) == (2, [])
    unmute(receiver, robot)
    look(90)
    look(100)
    assert (len(robot.asked), len(robot.taken)) == (3, 1)
    receiver.refresh_from_db()
    assert (receiver.tries, receiver.retry_at, receiver.problem) == (0, None, "")


def slot(receiver: AlertReceiver, robot: Robot) -> str:
    message: Any = type("Message", (), {"target": {"url": robot.url}})
    return receiver_key(messages.resolve_route(receiver).channel, message)


def unmute(receiver: AlertReceiver, robot: Robot) -> None:
    """The time that the vendor named is over."""
    for name in _key_names(slot(receiver, robot)):
        messages._get_quota_gate()._redis.delete(name)


def test_a_robot_that_has_had_enough_this_minute_is_left_alone(robot: Robot, on_duty: OnDuty, wrong: Wrong) -> None:
    """Whoever sent those messages: the vendor counts them all."""
    receiver = on_duty(holds_for=timedelta(0))
    wrong()
    used = slot(receiver, robot)
    quotas = messages.resolve_route(receiver).channel.quotas
    assert messages._get_quota_gate().acquire(quotas, {used: 20})[used].granted == 20
    look(0)
    receiver.refresh_from_db()
    assert (robot.asked, receiver.problem) == ([], "quota")


def test_a_restart_repeats_nothing(robot: Robot, on_duty: OnDuty, wrong: Wrong) -> None:
    on_duty(holds_for=timedelta(0))
    wrong()
    for seconds in (0, 10, 20):
        AlertEvaluator().evaluate(BEGAN + seconds * SECOND)
    assert len(robot.taken) == 1


@pytest.mark.django_db(transaction=True)
def test_two_passes_at_once_say_it_once(robot: Robot, on_duty: OnDuty, wrong: Wrong) -> None:
    on_duty(holds_for=timedelta(0))
    wrong()
    robot.may_answer.clear()

    def first() -> None:
        look(0)
        connection.close()

    running = threading.Thread(target=first)
    running.start()
    assert robot.waits.wait(30)
    look(600)  # while the first one waits for the robot's answer; it began long ago
    robot.may_answer.set()
    running.join()
    look(610)
    assert len(robot.asked) == 1


def test_who_dies_between_the_message_and_its_note_says_it_again(
    robot: Robot, on_duty: OnDuty, wrong: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least once. A receiver that honours the key sees one effect."""
    config = {"url": robot.url}
    hook = ChannelConfig.objects.create(key="hook", kind="webhook", config=config)
    on_duty(channel=hook, community=None, holds_for=timedelta(0))
    wrong()
    with monkeypatch.context() as dying:
        dying.setattr(notifier, "_store_result", lambda *_: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            look(0)
    look(60)
    assert len(robot.asked) == 1, "somebody else had it still"
    AlertReceiver.objects.update(watched_until=now())
    look(70)
    look(80)
    assert len(robot.asked) == 2
    first, second = (each["webhook-id"] for each in robot.headers)
    assert first == second


def test_one_that_cannot_be_told_keeps_no_other_from_hearing_it(robot: Robot, on_duty: OnDuty, wrong: Wrong) -> None:
    lost = on_duty("a", community=None, holds_for=timedelta(0))
    on_duty("b", holds_for=timedelta(0))
    wrong()
    look(0)
    lost.refresh_from_db()
    assert lost.problem.startswith("no_target")
    assert len(robot.taken) == 1


def test_a_receiver_whose_secret_no_key_reads_has_a_problem_until_it_is_mended(
    robot: Robot, on_duty: OnDuty, wrong: Wrong
) -> None:
    place = Community.objects.create(chat_id="lost", targets={"ops": {"url": robot.url}})
    lost = on_duty("a", community=place, holds_for=timedelta(0))
    on_duty("b", holds_for=timedelta(0))
    wrong()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE scheduling_community SET targets = 'gibberish' WHERE id = %s", [place.pk])
    look(0)
    lost.refresh_from_db()
    assert lost.problem == "internal_error Unreadable none of the keys can read scheduling.Community.targets"
    assert len(robot.taken) == 1
    place.save()
    look(10)
    lost.refresh_from_db()
    assert (lost.problem, len(robot.taken)) == ("", 2)


def test_a_pass_that_breaks_leaves_no_lease_behind(on_duty: OnDuty, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = on_duty()
    with monkeypatch.context() as breaking:
        breaking.setattr(messages, "resolve_route", lambda _: (_ for _ in ()).throw(KeyError("a bug")))
        look(0)
    receiver.refresh_from_db()
    assert (receiver.problem, receiver.watched_until) == ("internal_error KeyError 'a bug'", None)
    look(10)
    receiver.refresh_from_db()
    assert receiver.problem == "", "there is nothing to tell, and it could be told"


def test_who_is_switched_off_or_asks_for_nothing_hears_nothing(robot: Robot, on_duty: OnDuty, wrong: Wrong) -> None:
    on_duty("a", enabled=False, holds_for=timedelta(0))
    on_duty("b", limits={}, holds_for=timedelta(0))
    on_duty("c", limits={"paused": 86400 * 3, "gone": 1}, holds_for=timedelta(0))
    wrong()
    look(0)
    assert robot.asked == []


def test_a_broker_that_is_away_is_told_without_it(
    robot: Robot, on_duty: OnDuty, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_duty(limits={"broker": 0, "queue_length": 0, "unattended": 0}, holds_for=timedelta(0))
    monkeypatch.setattr(app, "connection_for_read", lambda **options: Connection("redis://127.0.0.1:1/0", **options))
    monkeypatch.setattr(messages, "_get_quota_gate", lambda: QuotaGate.connect("redis://127.0.0.1:1/0"))
    look(0)
    (told,) = robot.taken
    assert told.startswith("【告警】消息中间件没有响应\n")
    assert "\n\n" not in told, "what nobody knows is not told"


@pytest.mark.django_db(transaction=True)
def test_a_database_that_is_away_is_told_from_memory_and_once(
    robot: Robot, on_duty: OnDuty, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_duty(limits={"database": 0}, holds_for=timedelta(seconds=30))
    on_duty("b", limits={"paused": 60}, holds_for=timedelta(0))
    watching = AlertEvaluator()
    look(0, watching)

    def away(*_: Any) -> Any:
        raise OperationalError("the database is away")

    with monkeypatch.context() as outage:
        outage.setattr(AlertEvaluator, "_evaluate", away)
        for seconds in (10, 20, 40, 50, 60):
            look(seconds, watching)
    (told,) = robot.taken
    assert told.startswith("【告警】PostgreSQL 没有及时响应\n自 11-21 16:00:10 起，已持续 30 秒。\n")
    for seconds in (70, 80, 100, 110):
        look(seconds, watching)
    assert [each.splitlines()[0] for each in robot.taken[1:]] == ["【已恢复】PostgreSQL 没有及时响应"]


@pytest.mark.django_db(transaction=True)
def test_a_database_that_answers_now_and_then_is_told_once(
    robot: Robot, on_duty: OnDuty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look in six reaches it: neither that nor what was said before begins the outage anew."""
    on_duty(limits={"database": 0}, holds_for=timedelta(minutes=1))
    watching = AlertEvaluator()
    look(0, watching)
    with monkeypatch.context() as outage:
        really = AlertEvaluator._evaluate
        reached: list[int] = []

        def now_and_then(self: AlertEvaluator, at: Any) -> None:
            if (at - BEGAN).total_seconds() % 60:
                raise OperationalError("the database is away")
            reached.append(1)
            really(self, at)

        outage.setattr(AlertEvaluator, "_evaluate", now_and_then)
        for seconds in range(10, 300, 10):
            look(seconds, watching)
    assert len(reached) == 4
    (told,) = robot.taken
    assert told.startswith("【告警】PostgreSQL 没有及时响应\n自 11-21 16:00:10 起，已持续 1 分钟。\n")
    for seconds in (300, 310, 360, 370):
        look(seconds, watching)
    assert [each.splitlines()[0] for each in robot.taken[1:]] == ["【已恢复】PostgreSQL 没有及时响应"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("holds_for", [0, 15])
def test_a_database_that_goes_again_is_told_again(
    robot: Robot, on_duty: OnDuty, monkeypatch: pytest.MonkeyPatch, holds_for: int
) -> None:
    on_duty(limits={"database": 0}, holds_for=holds_for * SECOND)
    watching = AlertEvaluator()
    look(0, watching)

    def away(*_: Any) -> Any:
        raise OperationalError("the database is away")

    for begin_at in (10, 100):
        with monkeypatch.context() as outage:
            outage.setattr(AlertEvaluator, "_evaluate", away)
            for seconds in range(begin_at, begin_at + 30, 10):
                look(seconds, watching)
        for seconds in range(begin_at + 30, begin_at + 60, 10):
            look(seconds, watching)
    assert [each.splitlines()[0] for each in robot.taken] == [
        "【告警】PostgreSQL 没有及时响应", "【已恢复】PostgreSQL 没有及时响应",
    ] * 2  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_what_a_beat_said_that_lost_the_database_alone_is_called_over_by_its_heir(
    robot: Robot, on_duty: OnDuty, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_duty(limits={"database": 0}, holds_for=timedelta(0))
    cut_off = AlertEvaluator()
    look(0, cut_off)
    with monkeypatch.context() as outage:
        outage.setattr(AlertEvaluator, "_evaluate", lambda *_: (_ for _ in ()).throw(OperationalError))
        look(10, cut_off)
    cut_off.store_outages()
    look(20)
    assert [each.splitlines()[0] for each in robot.taken] == [
        "【告警】PostgreSQL 没有及时响应", "【已恢复】PostgreSQL 没有及时响应",
    ]  # fmt: skip


@pytest.mark.django_db(transaction=True)
def test_what_is_handed_in_while_the_heir_tells_the_same_breaks_neither(
    robot: Robot, on_duty: OnDuty, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = on_duty(limits={"database": 0}, holds_for=timedelta(0))
    cut_off = AlertEvaluator()
    look(0, cut_off)
    with monkeypatch.context() as outage:
        outage.setattr(AlertEvaluator, "_evaluate", lambda *_: (_ for _ in ()).throw(OperationalError))
        look(10, cut_off)
    robot.may_answer.clear()
    robot.waits.clear()

    def inherit() -> None:
        look(20)
        connection.close()

    heir = threading.Thread(target=inherit)
    with monkeypatch.context() as slow:
        slow.setattr(rules, "read_metrics", lambda _wanted: {})  # the database is too slow for the collectors
        heir.start()
        assert robot.waits.wait(30)
        cut_off.store_outages()
        robot.may_answer.set()
        heir.join()
    receiver.refresh_from_db()
    assert (receiver.problem, receiver.watched_until) == ("", None)
    look(30)
    assert [each.splitlines()[0] for each in robot.taken] == [
        "【告警】PostgreSQL 没有及时响应", "【告警】PostgreSQL 没有及时响应", "【已恢复】PostgreSQL 没有及时响应",
    ]  # fmt: skip


def test_every_condition_can_be_said_and_leads_to_a_page(robot: Robot) -> None:
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
