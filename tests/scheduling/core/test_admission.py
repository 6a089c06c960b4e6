"""Touches that their receivers cannot take now: each waits as a row with an instant of its own, unclaimed."""

import threading
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.utils.timezone import localtime, now
from prometheus_client.registry import REGISTRY

from config.local.processes import select_port, wait_until
from scheduling.channels.base import CalendarQuota, Delivered, Quota, Transient, channel_kinds
from scheduling.channels.quota import QuotaGate
from scheduling.channels.webhook import Webhook
from scheduling.delivery import admission, lanes, pipeline
from scheduling.delivery.sender import sender
from scheduling.ids import new_id
from scheduling.ledger.touches import TouchLedger, touch_ledger
from scheduling.models import ChannelConfig, HarassmentRule, Pause, Touch
from scheduling.operations import commands
from tests.scheduling.core.conftest import deliver_when_due, fall_due, make_quiet_now, pass_time, rows
from tests.scheduling.core.fake_channels import Died
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.touch_logs import list_verdicts
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

WINDOW = timedelta(seconds=1.5)
LIMIT = 10
QUOTA_LABELS = {"kind": "limited", "reason": "quota"}


class Robot(Webhook):
    """A receiver over HTTP that takes 10 messages in a short window."""

    kind = "robot"
    quotas = (Quota(LIMIT, WINDOW),)


@pytest.fixture
def channels(_sending, settings):
    settings.CHANNELS = settings.CHANNELS | {
        "robot": "tests.scheduling.core.test_admission.Robot",
        "limited": "tests.scheduling.core.fake_channels.Limited",
    }
    channel_kinds.cache_clear()


@pytest.fixture
def written(monkeypatch):
    """How often each touch was deferred at admission."""
    deferrals = Counter()
    defer = TouchLedger.defer

    def count(self, deferred):
        deferrals.update(list(deferred))
        defer(self, deferred)

    monkeypatch.setattr(TouchLedger, "defer", count)
    return deferrals


def deliver_due_until(ended, *, threads=2):
    """Deliver what falls due, like workers: each touch goes to one of them."""
    finished = threading.Event()

    def work(number):
        try:
            while not finished.is_set():
                due = Touch.objects.filter(state__in=("scheduled", "queued"), due_at__lte=Now())
                mine = [each for each in due.values_list("pk", flat=True) if each.int % threads == number]
                for start in range(0, len(mine), 100):
                    pipeline.deliver_touches(mine[start : start + 100])
                time.sleep(0.05)
        finally:
            connection.close()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        assert wait_until(ended, WAIT_LIMIT)
    finally:
        finished.set()
        for worker in workers:
            worker.join(WAIT_LIMIT)
    assert sender().drain(WAIT_LIMIT)


def all_delivered():
    return not Touch.objects.exclude(state="delivered").exists()


# --- quotas ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("channels")
def test_robot_quota_gives_each_touch_a_slot_of_its_own(shop, receiver, written, monkeypatch):
    """All waited for the same instant, were judged and written again, and 10 of them were sent: quadratic."""
    robot = ChannelConfig.objects.create(key="robot", kind="robot", idempotent=False, config={"url": receiver.url})
    shop.node(channel=robot)
    ids = shop.plan(30)
    fall_due()
    granted = []
    acquire = QuotaGate.acquire

    def note(self, quotas, wanted):
        before, grants = time.monotonic(), acquire(self, quotas, wanted)
        granted.extend([(before, time.monotonic())] * sum(grant.granted for grant in grants.values()))
        return grants

    monkeypatch.setattr(QuotaGate, "acquire", note)

    deliver_due_until(all_delivered)

    assert Counter(receiver.keys) == Counter(map(str, ids)), "one was lost or sent twice"
    spans = [later[1] - earlier[0] for earlier, later in zip(granted, granted[LIMIT:], strict=False)]
    assert min(spans) >= WINDOW.total_seconds(), "more than its quota was granted"
    assert len(list_verdicts()) <= 30 + 5
    assert 20 <= written.total() <= 2 * 20


@pytest.mark.parametrize("process", ["the same", "another"])
def test_batch_lost_after_its_reservation_loses_slots_only(limited, shop, monkeypatch, process):
    """A batch that is halved, or that PostgreSQL rolls back, reserved a second slot for each touch."""
    ids = shop.plan(6)
    fall_due()
    before = rows(ids)
    with monkeypatch.context() as patch:
        patch.setattr(TouchLedger, "defer", lambda *_, **__: _die())
        with pytest.raises(Died):
            pipeline.deliver_touches(ids)
    assert [(row.state, row.due_at, row.lease_no) for row in rows(ids)] == [
        (row.state, row.due_at, row.lease_no) for row in before
    ]

    if process == "another":
        admission.recent_quota_slots.clear()
    found = deliver_when_due(*ids)

    if process == "another":
        assert {(row.state, row.reason, row.lease_no) for row in found} == {("scheduled", "quota", 0)}
        assert min(row.due_at for row in found) > before[0].due_at + timedelta(minutes=100), "after the lost slots"
        assert not list_verdicts()
    else:
        assert Counter(row.state for row in found) == {"delivered": 2, "scheduled": 4}
        assert max(row.due_at for row in found) < now() + timedelta(hours=2, minutes=5)


def test_stopped_touches_take_no_slot(limited, shop):
    """Those of a disabled node took the slots of the receiver for hours, before other nodes, and ended unsent."""
    Pause.objects.create(scope=f"node:{limited.key}")
    paused = deliver_when_due(*shop.plan(6))
    assert {row.paused_by for row in paused} == {f"node:{limited.key}"}
    Pause.objects.all().delete()
    Touch.objects.update(paused_by="", reason="", due_at=now())
    limited.enabled = False
    limited.save()
    assert {row.reason for row in deliver_when_due(*(row.pk for row in paused))} == {"node_disabled"}

    limited.enabled = True
    limited.save()
    assert Counter(row.state for row in deliver_when_due(*shop.plan(6))) == {"delivered": 2, "scheduled": 4}


@pytest.mark.usefixtures("channels")
def test_channels_with_one_receiver_count_by_their_own_limits(shop):
    robot = {"kind": "limited", "config": {"name": "robot"}}
    shop.node("free", channel=shop.create_channel("free", **robot))
    shop.node("daily", channel=shop.create_channel("daily", **robot, daily_limit=5))
    sent = deliver_when_due(*shop.record_event().task_ids)

    assert [row.state for row in sent] == ["delivered"] * 2
    (state,) = sender().quotas.read_states([("limited:robot", (CalendarQuota(5, "day"),))])
    assert [use[:3] for use in state.uses] == [("day", 1, 5)]


@pytest.mark.parametrize("between", ["quiet hours", "retry"])
def test_used_slot_admits_no_second_time(between, limited, shop):
    """The process remembered the slot, also after its touch had used it: a claim and a verdict for nothing."""
    if between == "quiet hours":
        make_quiet_now()
    else:
        shop.answer(Transient("busy"))
    early = shop.plan(2)
    before = deliver_when_due(*early)
    assert {(row.state, row.lease_no) for row in before} == {("scheduled", 1)}
    HarassmentRule.objects.filter(kind="quiet_hours").delete()
    shop.answer(Delivered("heard"))
    if between == "quiet hours":
        sender().quotas._redis.flushall()
        later = [shop.record_event(user=f"other-{number}").task_ids[0] for number in range(2)]
        assert {row.state for row in deliver_when_due(*later)} == {"delivered"}
    judged = len(list_verdicts())

    after = deliver_when_due(*early)

    assert {(row.state, row.reason, row.lease_no) for row in after} == {("scheduled", "quota", 1)}
    assert len(list_verdicts()) == judged


def test_slot_of_a_lost_batch_is_forgotten_soon(limited, shop, monkeypatch):
    early = shop.plan(2)
    fall_due()
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "judge_batch", lambda _: _die())
        with pytest.raises(Died):
            pipeline.deliver_touches(early)
    later = [shop.record_event(user=f"other-{number}").task_ids[0] for number in range(2)]
    sender().quotas._redis.flushall()
    assert {row.state for row in deliver_when_due(*later)} == {"delivered"}
    monkeypatch.setattr(admission, "SLOT_MEMORY", -1.0)

    after = deliver_when_due(*early)

    assert {(row.reason, row.lease_no) for row in after} == {("quota", 0)}


def _die():
    raise Died


@pytest.fixture
def limited(channels, shop):
    """A node with a receiver that takes two in an hour."""
    return shop.node(channel=shop.create_channel(f"limited-{new_id()}", kind="limited"))


def test_high_priority_is_not_behind_planned_ones(limited, shop):
    shop.node("urgent", trigger="urgent", channel=limited.channel, priority=0)
    last = max(row.due_at for row in deliver_when_due(*shop.plan(20)))
    (urgent,) = shop.record_event("urgent", "ann").task_ids

    deferrals = REGISTRY.get_sample_value("aftertouch_deferrals_total", QUOTA_LABELS)
    (row,) = deliver_when_due(urgent)

    assert (row.state, row.reason) == ("scheduled", "quota")
    assert deferrals
    assert REGISTRY.get_sample_value("aftertouch_deferrals_total", QUOTA_LABELS) == deferrals + 1
    assert row.due_at < last - timedelta(hours=6)
    assert len(shop.fake_channel.received) == 2


def test_cancelled_touch_gives_its_slot_back(limited, shop):
    """A later touch was planned behind the slots of cancelled ones, and expired although the quota had room."""
    limited.cancel_on = ["order.paid"]
    limited.save()
    waiting = sorted(
        (row for row in deliver_when_due(*shop.plan(6)) if row.state == "scheduled"), key=lambda row: row.due_at
    )
    assert len(waiting) == 4
    for row in waiting[::2]:
        commands.cancel_one_touch(row.pk, actor="ops")
    for row in waiting[1::2]:
        shop.record_event("order.paid", row.customer.user_id)
    (later,) = shop.record_event(user="later").task_ids
    Touch.objects.filter(pk=later).update(expires_at=Now() + timedelta(hours=2))
    assert wait_until(lambda: count_returned_slots() == len(waiting), WAIT_LIMIT)

    (row,) = deliver_when_due(later)

    assert (row.state, row.reason) == ("scheduled", "quota")
    assert abs(row.due_at - waiting[0].due_at) < timedelta(seconds=5)


def test_moved_touch_gives_its_slot_back(limited, shop):
    """Its former instant was forgotten, and later touches waited behind an empty slot."""
    waiting = [row for row in deliver_when_due(*shop.plan(6)) if row.state == "scheduled"]
    later = [row.due_at + timedelta(days=1) for row in waiting]
    with transaction.atomic():
        moved = touch_ledger.reschedule([row.pk for row in waiting], later, expires_after=timedelta(days=1))
        assert moved == len(waiting) == 4
    assert wait_until(lambda: count_returned_slots() == len(waiting), WAIT_LIMIT)


def count_returned_slots():
    redis = sender().quotas._redis
    return sum(redis.zcard(key) for key in redis.scan_iter("at:quota:*:free:*"))


def test_hanging_redis_delays_no_commit_that_frees_slots(limited, shop, monkeypatch):
    """The thread that committed an event of intake waited for Redis, up to a second. An error ends no later return."""
    limited.cancel_on = ["order.paid"]
    limited.save()
    waiting = [row for row in deliver_when_due(*shop.plan(6)) if row.state == "scheduled"]
    committed = threading.Event()
    in_time = []

    def hang(self, slots):
        in_time.append(committed.wait(WAIT_LIMIT))
        raise OSError("Redis has hung")

    with monkeypatch.context() as patch:
        patch.setattr(QuotaGate, "give_back", hang)
        shop.record_event("order.paid", waiting[0].customer.user_id)
        committed.set()
        assert wait_until(lambda: bool(in_time), WAIT_LIMIT)
    assert in_time == [True]

    for row in waiting[1:]:
        shop.record_event("order.paid", row.customer.user_id)
    assert wait_until(lambda: count_returned_slots() == 3, WAIT_LIMIT)


def test_touch_waits_no_longer_than_its_expiry(limited, shop):
    """It takes no slot after its expiry: the next one that lives longer gets it."""
    ids = shop.plan(6)
    Touch.objects.filter(pk__in=ids[:4]).update(expires_at=Now() + timedelta(minutes=30))
    found = deliver_when_due(*ids)

    short = [row for row in found[:4] if row.state == "scheduled"]
    assert len(short) == 4 - sum(row.state == "delivered" for row in found[:4])
    assert all(abs(row.due_at - row.expires_at) < timedelta(seconds=5) for row in short)
    later = [row.due_at for row in found[4:] if row.state == "scheduled"]
    assert all(at < found[0].due_at + timedelta(minutes=70) for at in later)

    pass_time(minutes=31)
    expired = deliver_when_due(*(row.pk for row in short))
    assert {(row.state, row.reason) for row in expired} == {("suppressed", "expired")}


def test_touch_beyond_the_daily_limit_waits_for_the_next_day(shop):
    channel = shop.create_channel(f"daily-{new_id()}", daily_limit=2)
    shop.node(channel=channel)
    ids = shop.plan(5)
    Touch.objects.filter(pk=ids[4]).update(expires_at=Now() + timedelta(minutes=5), priority=2)

    found = deliver_when_due(*ids)

    assert len(shop.fake_channel.received) == 2
    waiting = [row for row in found[:4] if row.state == "scheduled"]
    assert {row.reason for row in waiting} == {"quota"}
    tomorrow = localtime().replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    assert all(timedelta(0) <= row.due_at - tomorrow < timedelta(seconds=5) for row in waiting)
    assert abs(found[4].due_at - found[4].expires_at) < timedelta(seconds=5), "it has no room before it expires"


def test_missed_slots_are_planned_again_without_verdict(limited, shop):
    """After an outage many slots have passed. All were judged, and claims wasted."""
    ids = shop.plan(10)
    deliver_when_due(*ids)
    sender().quotas._redis.flushall()
    waiting = [row.pk for row in rows(ids) if row.state == "scheduled"]
    assert len(waiting) == 8

    deliver_when_due(*waiting)

    assert len(list_verdicts()) == len(shop.fake_channel.received) == 4
    again = [row for row in rows(waiting) if row.state == "scheduled"]
    assert {(row.reason, row.lease_no) for row in again} == {("quota", 0)}
    assert len({row.due_at.replace(second=0, microsecond=0) for row in again}) >= 3


def test_unreachable_redis_grants_nothing(limited, shop, monkeypatch):
    gone = QuotaGate.connect(f"redis://127.0.0.1:{select_port()}/0")
    monkeypatch.setattr(sender(), "quotas", gone)
    ids = shop.plan(5)

    found = deliver_when_due(*ids)

    assert shop.fake_channel.received == []
    assert {(row.state, row.reason, row.lease_no) for row in found} == {("scheduled", "quota", 0)}
    assert not list_verdicts()
    monkeypatch.undo()
    assert {row.state for row in deliver_when_due(*ids)} == {"delivered", "scheduled"}
    assert len(shop.fake_channel.received) == 2


# --- receivers with finite capacity ----------------------------------------------------------------------------------


def test_slow_receiver_does_not_hold_up_another(shop, hook, receiver, written, monkeypatch):
    """A worker with a full process stopped working, and touches that could not be sent were judged again."""
    monkeypatch.setattr(lanes, "IN_FLIGHT_PER_TARGET", 5)
    receiver.delay = 0.25
    with ScriptedReceiver() as fast:
        other = ChannelConfig.objects.create(key="fast", kind="webhook", idempotent=True, config={"url": fast.url})
        shop.node(channel=hook)
        shop.node("fast", trigger="fast", channel=other)
        slow = shop.plan(30)
        fall_due(*slow)
        pipeline.deliver_touches(slow)
        quick = shop.plan(5, "fast")
        for task_id in quick:
            fall_due(task_id)
            pipeline.deliver_touches([task_id])
        assert wait_until(lambda: len(fast.calls) == 5, WAIT_LIMIT)
        assert Touch.objects.filter(pk__in=slow).exclude(state="delivered").exists(), "they were waited for"

        deliver_due_until(all_delivered)

        assert Counter(fast.keys) == Counter(map(str, quick))
    assert Counter(receiver.keys) == Counter(map(str, slow))
    assert len(list_verdicts()) <= 35 + 5
    assert written.total() < 5 * 30


def test_full_lane_is_asked_before_the_claim(shop, monkeypatch):
    monkeypatch.setattr(lanes, "IN_FLIGHT_PER_TARGET", 2)
    channel = shop.create_channel()
    shop.node(channel=channel)
    shop.node("urgent", trigger="urgent", channel=channel, priority=0)
    shop.fake_channel.blocks = True
    ids = shop.plan(30)
    fall_due()
    pipeline.deliver_touches(ids)

    waiting = [row for row in rows(ids) if row.state == "scheduled"]
    assert {(row.reason, row.lease_no, row.wakeups) for row in waiting} == {("target_busy", 0, 0)}
    assert 20 <= len(waiting) <= 26
    instants = sorted(row.due_at for row in waiting)
    assert instants[-1] - instants[0] >= timedelta(seconds=2), "they all return at one instant"
    (urgent,) = shop.record_event("urgent", "ann").task_ids
    fall_due(urgent)
    pipeline.deliver_touches([urgent])
    assert rows([urgent])[0].state == "running", "it has room of its own"

    shop.fake_channel.blocks = False
    shop.fake_channel.release_calls.set()
    assert {row.state for row in deliver_when_due(*ids) if row not in waiting} == {"delivered"}
    assert shop.fake_channel.received[2].task_id == urgent, "it waited behind the others of its receiver"


def test_lane_full_of_low_touches_has_room_for_normal_ones():
    held, channel = lanes.ReceiverLanes(), SimpleNamespace(at_once=1)
    for _ in range(9):
        held.hold("slow", channel, 2)
    assert held.find_wait("slow", channel, 2, own=0, total=0)
    assert held.find_wait("slow", channel, 1, own=0, total=0) is None


def test_low_touch_goes_first_before_its_deadline():
    """It was released, claimed and judged again as long as others arrived."""
    lane = lanes.ReceiverLane(limit=1)

    def wait(priority, age):
        claimed = time.monotonic() - age
        lane.waiting[priority].append(
            SimpleNamespace(clock=SimpleNamespace(monotonic=claimed), left=lambda now: claimed + 20 - now)
        )

    wait(2, age=5)
    wait(1, age=1)
    assert lane.next_waiting(time.monotonic()) is lane.waiting[1]
    lane.waiting[2].clear()
    wait(2, age=12)
    assert lane.next_waiting(time.monotonic()) is lane.waiting[2]


def test_full_process_leaves_each_receiver_a_small_share(monkeypatch):
    monkeypatch.setattr(lanes, "IN_FLIGHT", 30)
    monkeypatch.setattr(lanes, "SMALL_SHARE", 3)
    held = lanes.ReceiverLanes()
    channel = SimpleNamespace(at_once=None)
    for _ in range(30):
        held.hold("slow", channel, 1)

    def admitted(receiver, wanted):
        waits = [held.find_wait(receiver, channel, 1, own=own, total=own) for own in range(wanted)]
        return waits.count(None)

    assert (admitted("slow", 5), admitted("fast", 5)) == (0, 3)
    for _ in range(30):
        held.hold("slower", channel, 1)
    assert admitted("fast", 5) == 0, "nothing bounds the process"


def test_lanes_of_held_receivers_keep_no_others(monkeypatch):
    """While the first hundred held deliveries, the process remembered all others for ever."""
    monkeypatch.setattr(lanes, "REMEMBERED", 200)
    known, channel = lanes.ReceiverLanes(), SimpleNamespace(at_once=None)
    for number in range(150):
        known.hold(f"held-{number}", channel, 1)

    for number in range(2000):
        known.find_wait(f"other-{number}", channel, 1, own=0, total=0)

    assert len(known._lanes) <= 350
    assert all(known[f"held-{number}"].held == 1 for number in range(150))


def test_halved_batch_takes_each_instant_of_a_lane_once(shop, monkeypatch):
    monkeypatch.setattr(lanes, "IN_FLIGHT_PER_TARGET", 1)
    shop.node(channel=shop.create_channel())
    ids = shop.plan(16)
    fall_due()
    defer, failures = TouchLedger.defer, 2

    def fail(self, deferred):
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ValueError
        defer(self, deferred)

    monkeypatch.setattr(TouchLedger, "defer", fail)
    taken = []
    reserve_instant = lanes.ReceiverLane.reserve_instant

    def note(self, earliest, priority):
        taken.append(reserve_instant(self, earliest, priority))
        return taken[-1]

    monkeypatch.setattr(lanes.ReceiverLane, "reserve_instant", note)

    pipeline.deliver_touches(ids)

    assert failures < 0
    assert len(taken) <= 16, "each try took instants of its own"
    assert sender().drain(WAIT_LIMIT)


def test_lane_instants_follow_the_pace_of_the_receiver():
    lane = lanes.ReceiverLane(limit=10)
    lane.note_duration(5.0)

    normal = [lane.reserve_instant(100.0, 1) for _ in range(100)]
    high = [lane.reserve_instant(100.0, 0) for _ in range(4)]

    assert normal == pytest.approx([100 + each / 2 for each in range(1, 101)])
    assert high == pytest.approx([100.5, 101, 101.5, 102])
    far = [lane.reserve_instant(100.0, 1) for _ in range(5000)]
    assert max(far) <= 100 + lanes.LONGEST_WAIT
    assert len({round(each) for each in far}) > 300, "what is beyond the estimate returns at one instant"


def test_submitted_trial_counts_before_its_call_starts():
    """A process admits its next batch while the sender has not looked at the trial of the last one."""
    channel = SimpleNamespace(at_once=None)
    held, at = lanes.ReceiverLanes(), time.monotonic()
    for _ in range(5):
        held.hold("robot", channel, 1)
        held.end_call("robot", Transient("connect"), at, at)
        held.release("robot", 1, granted=False)
    (rest,) = held._lanes.values()
    rest.shut_until = at
    assert held.find_wait("robot", channel, 1, own=0, total=0) is None

    held.hold("robot", channel, 1)
    wait = held.find_wait("robot", channel, 1, own=0, total=0)

    assert wait is not None
    assert wait[0] == "target_down"


def test_resting_receiver_gets_one_trial_and_the_rest_no_verdict(shop):
    """Each rest cost all waiting touches a verdict and two writes, and all returned at one instant."""
    shop.node(channel=shop.create_channel(retry_delays=[3600] * 5))
    shop.answer(Transient("connect"))
    deliver_when_due(*(shop.record_event(user=f"dead-{number}").task_ids[0] for number in range(5)))
    ids = shop.plan(12)
    judged = len(list_verdicts())

    found = deliver_when_due(*ids)

    assert {(row.reason, row.lease_no) for row in found} == {("target_down", 0)}
    assert min(row.due_at for row in found) > Touch.objects.earliest("created_at").created_at + timedelta(seconds=25)
    assert len(list_verdicts()) == judged

    (rest,) = sender().lanes._lanes.values()
    rest.shut_until = time.monotonic()
    found = deliver_when_due(*ids)
    assert Counter(row.reason for row in found) == {"connect": 1, "target_down": 11}
    assert len(list_verdicts()) == judged + 1

    rest.shut_until = time.monotonic()
    shop.answer(Delivered("heard"))
    assert Counter(row.state for row in deliver_when_due(*(row.pk for row in found)))["delivered"] == 1
    assert {row.state for row in deliver_when_due(*ids)} == {"delivered"}
