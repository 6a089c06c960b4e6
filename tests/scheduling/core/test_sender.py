"""The sender on its bad days: what breaks in one parcel stays with that parcel."""

import threading
from datetime import timedelta

import pytest
from django.conf import settings
from django.db import OperationalError, connection

from config.local.processes import wait_until
from scheduling.channels.base import Delivered, NotSent, Permanent, Quota, Transient, Unknown
from scheduling.channels.quota import Grant, QuotaGate
from scheduling.delivery import admission, lanes, pipeline, sender
from scheduling.delivery.settling import settle_results
from scheduling.models import ChannelConfig, Community, FailedTask, Touch
from tests.scheduling.core.conftest import deliver_when_due, fall_due, rows
from tests.scheduling.core.fake_channels import FakeChannel
from tests.support.touch_logs import list_attempts
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def test_delivery_that_cannot_be_sent_or_stored_does_not_affect_others(shop, monkeypatch):
    """Settled together they all fail together, for 45 seconds; then their leases are over and their results lost."""
    answers = {
        "first": (Delivered("heard"), ("delivered", "")),
        "time beyond all time": (Transient("throttled", retry_after=timedelta.max), ("failed", "internal_error")),
        "reason": (Permanent("no\0reason"), ("failed", "internal_error")),
        "detail": (Permanent("gone", "a\0b", disable_target=True), ("failed", "gone")),
        "no answer": (Unknown("no\0reason"), ("unknown", "internal_error")),
        "status": (Delivered("fine", status=2**40), ("delivered", "")),
        "no target": (Delivered("never heard"), ("failed", "channel_error")),
        "last": (Delivered("heard"), ("delivered", "")),
    }

    def target_key(self, message):
        if message.user_id == "no target":
            raise KeyError("url")
        return "here"

    monkeypatch.setattr(FakeChannel, "target_key", target_key)
    shop.node(channel=shop.create_channel(idempotent=False))
    shop.fake_channel.play = lambda message: answers[message.user_id][0]

    found = deliver_when_due(*(shop.record_event(user=user).task_ids[0] for user in answers))

    assert [(row.state, row.reason) for row in found] == [end for _, end in answers.values()]
    assert found[list(answers).index("no target")].reserved_at is None
    assert FailedTask.objects.count() == 5
    assert len(list_attempts()) == len(answers) - 1, "without a receiver there is no attempt"
    assert sender.sender()._pending == 0


def test_chunk_margin_covers_its_slowest_channel(shop, monkeypatch):
    """A lease that ends during the call would let another worker send it as well."""
    margins = []
    real = sender.touch_ledger.mark_sending

    def mark_sending(sendings, *, margin):
        margins.append(margin)
        return real(sendings, margin=margin)

    monkeypatch.setattr(sender.touch_ledger, "mark_sending", mark_sending)
    shop.node("quick", channel=shop.create_channel("quick", timeout=timedelta(seconds=5)))
    shop.node("slow", trigger="other", channel=shop.create_channel("slow", timeout=timedelta(seconds=15)))
    both = [*shop.record_event().task_ids, *shop.record_event("other", "bob").task_ids]

    assert {row.state for row in deliver_when_due(*both)} == {"delivered"}
    assert margins == [timedelta(seconds=17 + sender.NOTE_WAIT)]


@pytest.fixture
def fake_touches(shop):
    """One due touch for a fake channel."""
    shop.node(channel=shop.create_channel())
    task_ids = shop.record_event().task_ids
    fall_due(*task_ids)
    return task_ids


@pytest.fixture
def leaving_sender(monkeypatch):
    """The sender of a process that is about to end."""
    leaving = sender.Sender(QuotaGate.connect(settings.REDIS_URL))
    for module in (pipeline, admission):
        monkeypatch.setattr(module, "sender", lambda: leaving)
    return leaving


def test_failed_settlement_is_repeated(fake_touches, leaving_sender, monkeypatch):
    tries = []

    def fail_twice(results):
        tries.append(len(results))
        if len(tries) <= 2:
            raise OperationalError("the server is starting up")
        settle_results(results)

    monkeypatch.setattr(sender, "settle_results", fail_twice)
    pipeline.deliver_touches(fake_touches)

    assert leaving_sender.drain(WAIT_LIMIT)  # to finish starts no more calls
    assert leaving_sender.finish(WAIT_LIMIT)
    assert (tries, Touch.objects.get().state) == ([1, 1, 1], "delivered")


def test_hanging_redis_does_not_delay_throttled_result(robot, record_event, monkeypatch):
    """Many wait for the same threads. When their leases end, certain refusals become `unknown`."""
    asked, answers = threading.Event(), threading.Event()

    def throttle(*arguments):
        asked.set()
        return answers.wait(WAIT_LIMIT)

    monkeypatch.setattr(sender.sender().quotas, "throttle", throttle)
    robot.script = [{"errcode": 130101, "errmsg": "send too fast"}]
    (text,) = record_event("text", "ann", chat_id="c1").task_ids
    fall_due(text)
    pipeline.deliver_touches([text])
    assert asked.wait(WAIT_LIMIT)

    settled = sender.sender().drain(WAIT_LIMIT / 2)
    answers.set()

    assert settled
    row = Touch.objects.get(pk=text)
    assert (row.state, row.reason) == ("scheduled", "vendor_130101")


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def marking_threads(monkeypatch):
    """The thread and the database's session of each write that marks."""
    found = []

    def mark_sending(*arguments, **more):
        stood = real(*arguments, **more)
        found.append((threading.current_thread(), _session()))
        return stood

    real = sender.touch_ledger.mark_sending
    monkeypatch.setattr(sender.touch_ledger, "mark_sending", mark_sending)
    return found


def _session():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def _lives(session):
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [session])
        return cursor.fetchone() is not None


def test_busy_event_loop_threads_do_not_block_marking(shop, marking_threads):
    """All channels were marked in them, by whichever was free, and each that ever did kept its connection."""
    shop.node("busy", channel=shop.create_channel("busy"))
    shop.node("other", trigger="other", channel=shop.create_channel("other"))
    shop.fake_channel.blocks = True
    busy = [shop.record_event(user=f"user-{number}").task_ids[0] for number in range(40)]
    fall_due(*busy)
    pipeline.deliver_touches(busy)
    assert wait_until(lambda: len(shop.fake_channel.received) == 40, WAIT_LIMIT)
    shop.fake_channel.blocks = False

    (other,) = shop.record_event(type="other", user="bob").task_ids
    fall_due(other)
    pipeline.deliver_touches([other])

    assert wait_until(lambda: Touch.objects.get(pk=other).state == "delivered", WAIT_LIMIT)
    assert {row.state for row in rows(busy)} == {"running"}, "it was marked when they had let go"
    assert len(set(marking_threads)) == 1
    shop.fake_channel.release_calls.set()


def test_sender_finish_ends_threads_and_connection(fake_touches, marking_threads, leaving_sender):
    pipeline.deliver_touches(fake_touches)

    assert leaving_sender.drain(WAIT_LIMIT)  # to finish starts no more calls
    assert leaving_sender.finish(WAIT_LIMIT)

    assert Touch.objects.get().state == "delivered"
    ((thread, session),) = marking_threads
    assert not thread.is_alive()
    assert wait_until(lambda: not _lives(session), WAIT_LIMIT)


def test_sender_finish_starts_no_more_calls(shop, leaving_sender, monkeypatch):
    """A call that starts late outlasts the process, and its outcome is unknown."""
    monkeypatch.setattr(lanes, "IN_FLIGHT_PER_TARGET", 1)
    shop.node(channel=shop.create_channel())
    shop.fake_channel.blocks = True
    task_ids = [shop.record_event(user=f"user-{number}").task_ids[0] for number in range(3)]
    fall_due(*task_ids)
    pipeline.deliver_touches(task_ids)
    assert shop.fake_channel.on_stage.wait(WAIT_LIMIT)
    shop.fake_channel.blocks = False

    assert not leaving_sender.finish(0), "a call is in flight"
    deferred = Touch.objects.filter(state="scheduled", reason="target_busy", reserved_at=None)
    assert wait_until(lambda: deferred.count() == 2, WAIT_LIMIT)
    shop.fake_channel.release_calls.set()

    assert leaving_sender.finish(WAIT_LIMIT)
    assert len(shop.fake_channel.received) == 1
    assert sorted(row.state for row in rows(task_ids)) == ["delivered", "scheduled", "scheduled"]


def test_sender_finish_defers_what_waits_for_quota(fake_touches, fake_channel, leaving_sender, monkeypatch):
    asked = threading.Event()

    def deny(quotas, wanted):
        asked.set()
        return {key: Grant(0, timedelta(0)) for key in wanted}

    monkeypatch.setattr(FakeChannel, "quotas", (Quota(100, timedelta(hours=1)),))
    monkeypatch.setattr(leaving_sender.quotas, "acquire", deny)
    pipeline.deliver_touches(fake_touches)
    assert asked.wait(WAIT_LIMIT)

    assert leaving_sender.finish(WAIT_LIMIT)
    row = Touch.objects.get()
    assert (row.state, row.reason, fake_channel.received) == ("scheduled", "target_busy", [])


def test_touch_without_free_connection_uses_up_no_retry(shop):
    """It failed after its last retry although no request of it had ever been sent, or after the first that was."""
    shop.node(channel=shop.create_channel("robot", retry_delays=[60]))
    (task_id,) = shop.record_event().task_ids
    busy = NotSent("busy").outcome()
    answers = [busy, busy, Transient("http_503"), busy, busy, Delivered()]
    shop.fake_channel.play = lambda message: answers.pop(0)
    while answers:
        (row,) = deliver_when_due(task_id)
        assert row.state == ("scheduled" if answers else "delivered")
        assert row.reason == ("" if not answers else "http_503" if len(answers) == 3 else "target_busy")
    assert [(each.number, each.outcome) for each in list_attempts(pk=task_id)] == [(1, "transient"), (2, "delivered")]


def test_touch_whose_mark_lost_its_answer_goes_again(fake_touches, fake_channel, monkeypatch):
    """The mark is stored, but nothing was sent. That is no attempt."""
    mark_sending = sender.touch_ledger.mark_sending

    def lose_answer(sendings, *, margin):
        assert mark_sending(sendings, margin=margin) == dict.fromkeys(fake_touches)
        raise OperationalError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(sender.touch_ledger, "mark_sending", lose_answer)
        (row,) = deliver_when_due(*fake_touches)
    assert (row.state, row.reason, row.attempt, fake_channel.received) == ("scheduled", "mark_failed", 0, [])

    (row,) = deliver_when_due(*fake_touches)
    assert (row.state, row.attempt, len(fake_channel.received)) == ("delivered", 1, 1)
    assert [(each.number, each.outcome) for each in list_attempts()] == [(1, "delivered")]


# --- two rows of channels that lead to one robot ---------------------------------------------------------------------


@pytest.fixture
def robot(matrix, receiver):
    """Of a community that names one for DingTalk as such, with a channel for texts and one for markdown."""
    Community.objects.create(chat_id="c1", targets={"dingtalk": {"url": receiver.url}})
    for form in ("text", "markdown"):
        channel = ChannelConfig.objects.create(key=form, kind="dingtalk", config={"format": form})
        matrix.node(form, trigger=form, channel=channel)
    return receiver


def test_robot_quota_is_shared_by_its_channels(robot, record_event):
    """It took 20 a minute from each of them, and its vendor mutes a robot for ten minutes that is sent 21."""
    robot.script = [{"errcode": 0}] * 30
    texts, others = (
        [record_event(form, f"{form}-{number}", chat_id="c1").task_ids[0] for number in range(15)]
        for form in ("text", "markdown")
    )

    first, later = deliver_when_due(*texts), deliver_when_due(*others)

    assert len(robot.calls) == 20
    assert {row.state for row in first} == {"delivered"}
    ends = sorted((row.state, row.reason) for row in later)
    assert ends == [("delivered", "")] * 5 + [("scheduled", "quota")] * 10


def test_muted_robot_is_not_called_by_other_channel(robot, record_event):
    robot.script = [{"errcode": 130101, "errmsg": "send too fast"}]
    (text,) = record_event("text", "ann", chat_id="c1").task_ids
    (other,) = record_event("markdown", "bob", chat_id="c1").task_ids

    found = deliver_when_due(text) + deliver_when_due(other)

    assert [(row.state, row.reason) for row in found] == [("scheduled", "vendor_130101"), ("scheduled", "quota")]
    assert len(robot.calls) == 1
