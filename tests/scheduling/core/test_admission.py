"""Touches that their receivers cannot take now: each waits as a row with an instant of its own, unclaimed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.utils.timezone import now
from pytest_django import Settings

from config.local.processes import select_port, wait_until
from scheduling.channels.base import Outcome, Quota, Transient
from scheduling.channels.kinds import channel_kinds
from scheduling.channels.quota import QuotaGate
from scheduling.channels.webhook import Webhook
from scheduling.delivery import admission, lanes, pipeline
from scheduling.delivery.sender import sender
from scheduling.ids import new_id
from scheduling.ledger.touches import TouchLedger
from scheduling.models import ChannelConfig, Node, Pause, Touch, Verdict
from tests.scheduling.core.conftest import WAIT_LIMIT, deliver_when_due, fall_due, pass_time, rows
from tests.scheduling.core.fake_channels import Died, FakeChannelState
from tests.scheduling.core.receivers import ScriptedReceiver

pytestmark = pytest.mark.django_db(transaction=True)

WINDOW = timedelta(seconds=1.5)
LIMIT = 20


class Robot(Webhook):
    """A receiver over HTTP that takes 20 messages in a short window."""

    kind: ClassVar[str] = "robot"
    quotas: ClassVar[tuple[Quota, ...]] = (Quota(LIMIT, WINDOW),)


@pytest.fixture
def channels(_sending: None, settings: Settings) -> None:
    settings.CHANNELS = settings.CHANNELS | {
        "robot": "tests.scheduling.core.test_admission.Robot",
        "limited": "tests.scheduling.core.fake_channels.Limited",
    }
    channel_kinds.cache_clear()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[UUID]:
    """How often each touch was deferred at admission."""
    deferrals: Counter[UUID] = Counter()
    defer = TouchLedger.defer

    def count(self: TouchLedger, deferred: Any) -> None:
        deferrals.update(list(deferred))
        defer(self, deferred)

    monkeypatch.setattr(TouchLedger, "defer", count)
    return deferrals


def deliver_due_until(ended: Callable[[], bool], *, threads: int = 2) -> None:
    """Deliver what falls due, like workers: each touch goes to one of them."""
    finished = threading.Event()

    def work(number: int) -> None:
        try:
            while not finished.is_set():
                due = Touch.objects.filter(state__in=("scheduled", "queued"), due_at__lte=Now())
                mine = [each for each in due.values_list("pk", flat=True) if each.int % threads == number]
                for start in range(0, len(mine), 100):
                    pipeline.deliver_touches(mine[start : start + 100])
                time.sleep(0.01)
        finally:
            connection.close()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        assert wait_until(ended, 4 * WAIT_LIMIT)
    finally:
        finished.set()
        for worker in workers:
            worker.join(WAIT_LIMIT)
    assert sender().drain(WAIT_LIMIT)


def all_delivered() -> bool:
    return not Touch.objects.exclude(state="delivered").exists()


# --- quotas ----------------------------------------------------------------------------------------------------------


def test_robot_quota_gives_each_touch_a_slot_of_its_own(
    matrix: Any, channels: None, receiver: ScriptedReceiver, record_event: Any, written: Counter[UUID],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All waited for the same instant, were judged and written again, and 20 of them were sent: quadratic."""
    robot = ChannelConfig.objects.create(key="robot", kind="robot", idempotent=False, config={"url": receiver.url})
    matrix.node(channel=robot)
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(300)]
    fall_due()
    granted: list[tuple[float, float]] = []
    acquire = QuotaGate.acquire

    def note(self: QuotaGate, quotas: Any, wanted: Any) -> Any:
        before, grants = time.monotonic(), acquire(self, quotas, wanted)
        granted.extend([(before, time.monotonic())] * sum(grant.granted for grant in grants.values()))
        return grants

    monkeypatch.setattr(QuotaGate, "acquire", note)

    deliver_due_until(all_delivered)

    assert Counter(receiver.keys) == Counter(map(str, ids)), "one was lost or sent twice"
    spans = [later[1] - earlier[0] for earlier, later in zip(granted, granted[LIMIT:], strict=False)]
    assert min(spans) >= WINDOW.total_seconds(), "more than its quota was granted"
    assert Verdict.objects.count() <= 315
    assert 280 <= written.total() <= 560


def test_batch_lost_after_its_reservation_loses_slots_only(
    matrix: Any, channels: None, create_fake_channel: Any, fake_channel: FakeChannelState, record_event: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    matrix.node(channel=create_fake_channel(f"limited-{new_id()}", kind="limited"))
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(5)]
    fall_due()
    before = rows(ids)

    with monkeypatch.context() as patch:
        patch.setattr(TouchLedger, "defer", lambda *_, **__: _die())
        with pytest.raises(Died):
            pipeline.deliver_touches(ids)
    assert [(row.state, row.due_at, row.lease_no) for row in rows(ids)] == [
        (row.state, row.due_at, row.lease_no) for row in before
    ]

    admission.recent_slots.clear()  # another process delivers them
    found = deliver_when_due(*ids)
    assert {(row.state, row.reason) for row in found} == {("scheduled", "quota")}
    assert {row.lease_no for row in found} == {0}
    assert min(row.due_at for row in found) > before[0].due_at + timedelta(minutes=100), "the slots of the lost batch"
    assert not Verdict.objects.exists()


def test_repeated_batch_keeps_its_slots(limited: Node, record_event: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is halved, or that PostgreSQL rolls back, reserved a second slot for each touch."""
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(6)]
    fall_due()
    with monkeypatch.context() as patch:
        patch.setattr(TouchLedger, "defer", lambda *_, **__: _die())
        with pytest.raises(Died):
            pipeline.deliver_touches(ids)

    found = deliver_when_due(*ids)

    assert Counter(row.state for row in found) == {"delivered": 2, "scheduled": 4}
    assert max(row.due_at for row in found) < now() + timedelta(hours=2, minutes=5)


def test_paused_touches_take_no_slot(limited: Node, record_event: Any) -> None:
    Pause.objects.create(scope=f"node:{limited.key}")
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(6)]
    assert {row.parked for row in deliver_when_due(*ids)} == {f"node:{limited.key}"}

    Pause.objects.all().delete()
    Touch.objects.update(parked="", reason="", due_at=now())
    assert Counter(row.state for row in deliver_when_due(*ids)) == {"delivered": 2, "scheduled": 4}


def _die() -> None:
    raise Died


@pytest.fixture
def limited(matrix: Any, channels: None, create_fake_channel: Any, fake_channel: FakeChannelState) -> Node:
    """A node with a receiver that takes two in an hour."""
    node = matrix.node(channel=create_fake_channel(f"limited-{new_id()}", kind="limited"))
    assert isinstance(node, Node)
    return node


def test_high_priority_is_not_behind_planned_ones(
    matrix: Any, limited: Node, record_event: Any, fake_channel: FakeChannelState
) -> None:
    matrix.node("urgent", trigger="urgent", channel=limited.channel, priority=0)
    planned = [record_event(user=f"user-{number}").task_ids[0] for number in range(50)]
    last = max(row.due_at for row in deliver_when_due(*planned))
    (urgent,) = record_event("urgent", "ann").task_ids

    (row,) = deliver_when_due(urgent)

    assert (row.state, row.reason) == ("scheduled", "quota")
    assert row.due_at < last - timedelta(hours=20)
    assert len(fake_channel.received) == 2


def test_touch_waits_no_longer_than_its_expiry(
    limited: Node, record_event: Any, fake_channel: FakeChannelState
) -> None:
    """It takes no slot after its expiry: the next one that lives longer gets it."""
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(6)]
    Touch.objects.filter(pk__in=ids[:4]).update(expires_at=Now() + timedelta(minutes=30))
    found = deliver_when_due(*ids[:4], *ids[4:])

    short = [row for row in found[:4] if row.state == "scheduled"]
    assert len(short) == 4 - sum(row.state == "delivered" for row in found[:4])
    assert all(abs(row.due_at - row.expires_at) < timedelta(seconds=5) for row in short)
    later = [row.due_at for row in found[4:] if row.state == "scheduled"]
    assert all(at < found[0].due_at + timedelta(minutes=70) for at in later)

    pass_time(minutes=31)
    expired = deliver_when_due(*(row.pk for row in short))
    assert {(row.state, row.reason) for row in expired} == {("suppressed", "expired")}


def test_missed_slots_are_planned_again_without_verdict(
    limited: Node, record_event: Any, fake_channel: FakeChannelState
) -> None:
    """After an outage many slots have passed. All were judged, and claims wasted."""
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(10)]
    deliver_when_due(*ids)
    sender().quotas._redis.flushall()
    waiting = [row.pk for row in rows(ids) if row.state == "scheduled"]
    assert len(waiting) == 8

    deliver_when_due(*waiting)

    assert Verdict.objects.count() == len(fake_channel.received) == 4
    again = [row for row in rows(waiting) if row.state == "scheduled"]
    assert {(row.reason, row.lease_no) for row in again} == {("quota", 0)}
    assert len({row.due_at.replace(second=0, microsecond=0) for row in again}) >= 3


def test_unreachable_redis_grants_nothing(
    limited: Node, record_event: Any, fake_channel: FakeChannelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = QuotaGate.connect(f"redis://127.0.0.1:{select_port()}/0")
    monkeypatch.setattr(sender(), "quotas", gone)
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(5)]

    found = deliver_when_due(*ids)

    assert fake_channel.received == []
    assert {(row.state, row.reason, row.lease_no) for row in found} == {("scheduled", "quota", 0)}
    assert not Verdict.objects.exists()
    monkeypatch.undo()
    assert {row.state for row in deliver_when_due(*ids)} == {"delivered", "scheduled"}
    assert len(fake_channel.received) == 2


# --- receivers with finite capacity ----------------------------------------------------------------------------------


def test_slow_receiver_does_not_hold_up_another(
    matrix: Any, hook: ChannelConfig, receiver: ScriptedReceiver, record_event: Any, written: Counter[UUID],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A worker stood still once its process held too much, and touches that waited in vain were judged again."""
    monkeypatch.setattr(lanes, "IN_FLIGHT_PER_TARGET", 5)
    receiver.delay = 0.25
    with ScriptedReceiver() as fast:
        other = ChannelConfig.objects.create(key="fast", kind="webhook", idempotent=True, config={"url": fast.url})
        matrix.node(channel=hook)
        matrix.node("fast", trigger="fast", channel=other)
        slow = [record_event(user=f"user-{number}").task_ids[0] for number in range(150)]
        fall_due(*slow)
        pipeline.deliver_touches(slow)
        quick = [record_event("fast", f"user-{number}").task_ids[0] for number in range(20)]
        for task_id in quick:
            fall_due(task_id)
            pipeline.deliver_touches([task_id])
        assert wait_until(lambda: len(fast.calls) == 20, WAIT_LIMIT)
        assert Touch.objects.filter(pk__in=slow).exclude(state="delivered").count() > 100, "they were waited for"

        deliver_due_until(all_delivered)

        assert Counter(fast.keys) == Counter(map(str, quick))
    assert Counter(receiver.keys) == Counter(map(str, slow))
    assert Verdict.objects.count() <= 1.05 * 170
    assert written.total() < 5 * 150


def test_full_lane_is_asked_before_the_claim(
    matrix: Any, create_fake_channel: Any, fake_channel: FakeChannelState, record_event: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(lanes, "IN_FLIGHT_PER_TARGET", 2)
    channel = create_fake_channel(timeout=timedelta(seconds=30))
    matrix.node(channel=channel)
    matrix.node("urgent", trigger="urgent", channel=channel, priority=0)
    fake_channel.blocks = True
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(30)]
    fall_due()
    pipeline.deliver_touches(ids)

    waiting = [row for row in rows(ids) if row.state == "scheduled"]
    assert {(row.reason, row.lease_no, row.hints) for row in waiting} == {("target_busy", 0, 0)}
    assert 20 <= len(waiting) <= 26
    instants = sorted(row.due_at for row in waiting)
    assert instants[-1] - instants[0] >= timedelta(seconds=2), "they all return at one instant"
    (urgent,) = record_event("urgent", "ann").task_ids
    fall_due(urgent)
    pipeline.deliver_touches([urgent])
    assert rows([urgent])[0].state == "running", "it has room of its own"

    fake_channel.blocks = False
    fake_channel.release_calls.set()
    assert {row.state for row in deliver_when_due(*ids) if row not in waiting} == {"delivered"}


def test_full_process_leaves_each_receiver_a_small_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IN_FLIGHT", 30)
    monkeypatch.setattr(lanes, "SMALL_SHARE", 3)
    held = lanes.ReceiverLanes()
    channel: Any = object()
    for _ in range(30):
        held.hold("slow", channel)

    def admitted(receiver: str, wanted: int) -> int:
        waits = [held.find_wait(receiver, channel, 1, own=own, total=own) for own in range(wanted)]
        return waits.count(None)

    assert (admitted("slow", 5), admitted("fast", 5)) == (0, 3)
    for _ in range(30):
        held.hold("slower", channel)
    assert admitted("fast", 5) == 0, "nothing bounds the process"


def test_lane_instants_follow_the_pace_of_the_receiver() -> None:
    lane = lanes.ReceiverLane(limit=10)
    lane.note_duration(5.0)

    normal = [lane.reserve_instant(100.0, 1) for _ in range(100)]
    high = [lane.reserve_instant(100.0, 0) for _ in range(4)]

    assert normal == pytest.approx([100 + each / 2 for each in range(1, 101)])
    assert high == pytest.approx([100.5, 101, 101.5, 102])
    far = [lane.reserve_instant(100.0, 1) for _ in range(5000)]
    assert max(far) <= 100 + lanes.LONGEST_WAIT
    assert len({round(each) for each in far}) > 300, "what is beyond the estimate returns at one instant"


def test_resting_receiver_gets_one_trial_and_the_rest_no_verdict(
    matrix: Any, create_fake_channel: Any, fake_channel: FakeChannelState, record_event: Any
) -> None:
    """Each rest cost all waiting touches a verdict and two writes, and all returned at one instant."""
    matrix.node(channel=create_fake_channel(retry_delays=[3600] * 5))
    answer: list[Outcome] = [Transient("connect")]
    play = fake_channel.play
    fake_channel.play = lambda message: answer[0] if answer else play(message)
    deliver_when_due(*(record_event(user=f"dead-{number}").task_ids[0] for number in range(5)))
    ids = [record_event(user=f"user-{number}").task_ids[0] for number in range(40)]
    judged = Verdict.objects.count()

    found = deliver_when_due(*ids)

    assert {(row.reason, row.lease_no) for row in found} == {("target_down", 0)}
    assert min(row.due_at for row in found) > Touch.objects.earliest("created_at").created_at + timedelta(seconds=25)
    assert Verdict.objects.count() == judged

    (rest,) = sender().lanes._breaker._rows.values()
    rest.shut_until = time.monotonic()
    found = deliver_when_due(*ids)
    assert Counter(row.reason for row in found) == {"connect": 1, "target_down": 39}
    assert Verdict.objects.count() == judged + 1

    rest.shut_until = time.monotonic()
    answer.clear()
    assert Counter(row.state for row in deliver_when_due(*(row.pk for row in found)))["delivered"] == 1
    assert {row.state for row in deliver_when_due(*ids)} == {"delivered"}


def test_touch_of_local_channel_is_admitted_without_questions(
    matrix: Any, record_event: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduling.delivery.admission.sender", _die)
    matrix.node()
    (row,) = deliver_when_due(*record_event().task_ids)

    assert row.state == "delivered"
