from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise

from redis import Redis

from config.local.processes import select_port
from scheduling.channels import quota
from scheduling.channels.base import Quota
from scheduling.channels.quota import NEAR_SLOT, QuotaGate, SlotRequest
from scheduling.ids import new_id
from tests.scheduling.channels.conftest import age_slots

ZERO = timedelta(0)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
TWENTY = (Quota(20, MINUTE),)
KEY = "wecom:robot"
HIGH, NORMAL, LOW = 0, 1, 2


def reserve(gate, count, *, priority=NORMAL, longest=10 * HOUR, slot_came=False, quotas=TWENTY):
    requests = [SlotRequest(longest, slot_came)] * count
    return gate.reserve(quotas, {(KEY, priority): requests})[KEY, priority]


def minutes(waits):
    """The windows in which the slots lie."""
    return [-1 if wait is None else round(wait / MINUTE) for wait in waits]


def test_reserve_full_window_continues_in_the_next(gate):
    assert minutes(reserve(gate, 50)) == [0] * 20 + [1] * 20 + [2] * 10
    assert minutes(reserve(gate, 15)) == [2] * 10 + [3] * 5


def test_reserve_racing_gates_give_distinct_slots(server, valkey_url):
    gates = [QuotaGate.connect(valkey_url, margin=ZERO) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda gate: [wait for _ in range(5) for wait in reserve(gate, 5)], gates)
    waits = sorted(minute for each in found for minute in minutes(each))
    for gate in gates:
        gate.close()

    assert waits == [window for window in range(10) for _ in range(20)]


def test_reserve_several_quotas_keeps_each_limit(gate, server):
    quotas = (Quota(5, timedelta(seconds=1)), Quota(12, timedelta(seconds=10)))
    waits = [wait for _ in range(8) for wait in reserve(gate, 5, quotas=quotas)]
    (name,) = server.keys()
    instants = [int(each) for each in server.lrange(name, 0, -1)]

    assert None not in waits
    assert len(instants) == 12, "no more than the largest limit are kept"
    for limit, window in ((5, 1_000_000), (12, 10_000_000)):
        assert all(later - earlier >= window for earlier, later in zip(instants, instants[limit:], strict=False))
    assert all(earlier <= later for earlier, later in pairwise(instants))


def test_reserve_keeps_the_plan_that_another_row_counts(gate, server):
    """Two channel rows with one receiver: the second has a small limit in a short window."""
    assert minutes(reserve(gate, 30)) == [0] * 20 + [1] * 10
    reserve(gate, 1, quotas=(Quota(5, timedelta(seconds=1)),))

    assert minutes(reserve(gate, 20)) == [1] * 9 + [2] * 11
    (name,) = server.keys()
    assert 3 * 60_000 - 10_000 < server.pttl(name) <= 3 * 60_000 + 2_000


def test_reserve_counts_grants_once(gate):
    """Ten were planned for now and sent. Ten more may be sent now."""
    reserve(gate, 10)
    gate.acquire(TWENTY, {KEY: 10})

    assert minutes(reserve(gate, 12)) == [0] * 10 + [1] * 2
    assert minutes(reserve(gate, 1)) == [1], "what is planned for now counts before it is sent"


def test_reserve_counts_late_grants(gate, server):
    """What was planned two minutes ago is sent only now, after an outage."""
    reserve(gate, 20)
    age_slots(server, 2 * MINUTE)
    gate.acquire(TWENTY, {KEY: 20})

    assert minutes(reserve(gate, 1)) == [1]


def test_reserve_past_plan_is_forgotten(gate, server):
    reserve(gate, 100)
    age_slots(server, HOUR)

    assert minutes(reserve(gate, 21)) == [0] * 20 + [1]


def test_reserve_mute_comes_first(gate):
    gate.throttle(KEY, 10 * MINUTE)

    assert minutes(reserve(gate, 21)) == [10] * 20 + [11]
    assert minutes(reserve(gate, 2, slot_came=True)) == [10, 10], "they come before those that wait"


def test_reserve_high_priority_passes_the_plan(gate):
    """Thousands of normal ones are planned. High ones count only the grants and each other; low ones come last."""
    reserve(gate, 100)
    gate.acquire(TWENTY, {KEY: 15})

    assert minutes(reserve(gate, 10, priority=HIGH)) == [0] * 5 + [1] * 5
    assert minutes(reserve(gate, 1)) == [5]
    assert minutes(reserve(gate, 1, priority=LOW)) == [5]
    assert minutes(reserve(gate, 100, priority=HIGH))[-1] == 6
    assert minutes(reserve(gate, 1)) == [6]


def test_given_back_slots_serve_the_next_touches(gate):
    """3,000 were planned and 2,900 of them cancelled. The next waited behind 150 minutes of dead slots."""
    waits = reserve(gate, 3000)
    assert minutes(waits)[-1] == 149
    gate.give_back({(KEY, NORMAL): [(new_id(), wait) for wait in waits[100:] if wait]})

    assert minutes(reserve(gate, 100, longest=2 * HOUR)) == sorted([5, 6, 7, 8, 9] * 20)
    assert minutes(reserve(gate, 2, priority=LOW, longest=11 * MINUTE)) == [10, 10]
    assert minutes(reserve(gate, 2, longest=5 * MINUTE)) == [-1, -1]
    assert minutes(reserve(gate, 2798)) == sorted([*range(10, 150)] * 20)[2:]
    assert minutes(reserve(gate, 1)) == [150]


def test_given_back_slot_is_taken_once(server, gate):
    waits = reserve(gate, 40)
    gate.give_back({(KEY, NORMAL): [(new_id(), waits[-1])]})

    with ThreadPoolExecutor(8) as threads:
        found = [each for waits in threads.map(lambda _: reserve(gate, 1), range(8)) for each in minutes(waits)]
    assert sorted(found) == [1] + [2] * 7


def test_reserve_slot_after_expiry_is_not_taken(gate):
    short, long = SlotRequest(MINUTE / 2), SlotRequest(HOUR)

    found = gate.reserve(TWENTY, {(KEY, NORMAL): [long] * 20 + [short] * 500 + [long]})[KEY, NORMAL]

    assert minutes(found) == [0] * 20 + [-1] * 500 + [1]


def test_reserve_touch_whose_slot_came_goes(gate, server):
    """The plan has no room for hours, but the target has: the touch waited for its slot."""
    reserve(gate, 1000)
    gate.acquire(TWENTY, {KEY: 15})

    assert minutes(reserve(gate, 7, slot_came=True)) == [0] * 5 + [1] * 2
    gate.acquire(TWENTY, {KEY: 5})
    assert minutes(reserve(gate, 20, slot_came=True)) == [1] * 18 + [2] * 2, "they have no slot of the two"
    assert minutes(reserve(gate, 1)) == [50]


def test_slots_that_passed_during_an_outage_come_next(gate, server):
    """No worker ran for two minutes. The touches of that time went to the end of the plan, hours later."""
    due = dict(enumerate(wait for wait in reserve(gate, 240) if wait is not None))
    sent_at = {}
    deferrals = Counter()
    at, step = ZERO, timedelta(seconds=15)
    while due:
        if not 3 * MINUTE < at <= 5 * MINUTE:
            asking = sorted((slot, number) for number, slot in due.items() if slot <= at)
            for (_, number), wait in zip(asking, reserve(gate, len(asking), slot_came=True), strict=True):
                assert wait is not None
                if wait:
                    due[number], deferrals[number] = at + wait, deferrals[number] + 1
                else:
                    assert gate.acquire(TWENTY, {KEY: 1})[KEY].granted == 1
                    sent_at[number] = at
                    del due[number]
        at += step
        age_slots(server, step)

    assert max(sent_at.values()) < 15 * MINUTE, "240 take 12 minutes, and the outage two"
    assert max(sent_at[number] - number // 20 * MINUTE for number in sent_at) < 4 * MINUTE
    assert max(deferrals.values()) <= 4


def test_reserve_waits_for_a_near_grant(gate, server):
    gate.acquire(TWENTY, {KEY: 20})
    age_slots(server, MINUTE - NEAR_SLOT / 2)

    assert reserve(gate, 20, slot_came=True) == [ZERO] * 20


def test_reserve_without_redis_waits_and_asks_once(monkeypatch):
    gate = QuotaGate.connect(f"redis://127.0.0.1:{select_port()}/0")

    asked = []
    pipeline = Redis.pipeline
    monkeypatch.setattr(Redis, "pipeline", lambda *given, **named: asked.append(given) or pipeline(*given, **named))
    monkeypatch.setattr(quota, "UNAVAILABLE_DELAY", HOUR)
    waits = reserve(gate, 100)
    again = [reserve(gate, 1) for _ in range(100)]

    assert all(wait and HOUR <= wait <= 2 * HOUR for wait in waits)
    assert len(set(waits)) > 50, "they all return at one instant"
    assert all(wait and wait >= HOUR for (wait,) in again)
    assert len(asked) == 1
    gate.close()


def test_reserve_counts_touches_that_go_now(gate, server):
    """The plan is lost or past: those that go now are in no list yet."""
    came, new = SlotRequest(HOUR, slot_came=True), SlotRequest(HOUR)

    found = gate.reserve(TWENTY, {(KEY, NORMAL): [came] * 15 + [new] * 10})[KEY, NORMAL]

    assert minutes(found) == [0] * 20 + [1] * 5


def test_reserve_counts_touches_in_transit(gate):
    """They were admitted and wait for a grant in the sender. More of them could not be sent there."""
    requests = [SlotRequest(HOUR, slot_came=True)] * 10

    found = gate.reserve(TWENTY, {(KEY, NORMAL): requests}, {KEY: 15})[KEY, NORMAL]

    assert minutes(found) == [0] * 5 + [1] * 5
