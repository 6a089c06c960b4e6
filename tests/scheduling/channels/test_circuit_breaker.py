from scheduling.channels.base import Delivered, Permanent, Transient, Unknown
from scheduling.delivery.lanes import ReceiverLane, is_receiver_dead
from tests.support.tables import each_row

DEAD = Transient("connect")
ALIVE = Transient("http_503")


def broken(lane, now=0.0):
    for _ in range(5):
        lane.record_outcome(DEAD, now)


@each_row(
    "outcome, dead",
    [
        (Transient("dns"), True),
        (Transient("connect"), True),
        (Transient("connect_timeout"), True),
        (Transient("tls"), True),
        (Transient("proxy"), True),
        (Unknown("timeout"), True),
        (Unknown("disconnected"), False),
        (Transient("http_503"), False),
        (Permanent("http_404"), False),
        (Delivered(), False),
    ],
)
def test_is_receiver_dead_by_outcome(outcome, dead):
    assert is_receiver_dead(outcome) is dead


def test_breaker_opens_target_after_five_failures_in_a_row():
    lane = ReceiverLane(1)
    for _ in range(2):
        lane.record_outcome(ALIVE, 100.0)
        for _ in range(4):
            lane.record_outcome(DEAD, 100.0)
        assert lane.admit_call(100.0) == 0
    for _ in range(200):  # of calls at the same time
        lane.record_outcome(DEAD, 100.0)

    assert lane.admit_call(100.0) == 30
    assert lane.admit_call(129.0) == 1
    assert lane.remaining_rest(110.0) == 20


def test_breaker_admits_one_probe_that_decides():
    lane = ReceiverLane(1)
    broken(lane)

    assert lane.admit_call(30.0) == 0
    assert lane.admit_call(30.0) == 30
    lane.record_outcome(DEAD, 35.0)
    assert lane.admit_call(36.0) == 59

    assert lane.admit_call(95.0) == 0
    lane.record_outcome(Delivered(), 95.1)
    assert lane.admit_call(95.2) == 0
    assert lane.admit_call(95.2) == 0
    assert lane.remaining_rest(95.2) == 0


def failed_probe(lane, now):
    """The rest after it."""
    assert lane.admit_call(now) == 0
    lane.record_outcome(DEAD, now)
    return lane.admit_call(now)


def test_breaker_failed_probes_double_the_rest():
    """At 30 s for ever a touch that may wait for three days was judged 8,640 times."""
    lane = ReceiverLane(1)
    broken(lane)
    now, rests = 30.0, []
    for _ in range(1_100):  # a week; doubled for so long, a number would be too large for a float
        rests.append(failed_probe(lane, now))
        now += rests[-1]

    assert rests[:6] == [60, 120, 240, 480, 600, 600]
    assert set(rests[6:]) == {600}

    assert lane.admit_call(now) == 0
    lane.record_outcome(ALIVE, now)
    broken(lane, now=now)
    assert lane.admit_call(now) == 30, "a response begins anew"


@each_row("probes", [0, 5])
def test_breaker_lost_probe_costs_the_first_rest(probes):
    lane = ReceiverLane(1)
    broken(lane)
    now = 30.0
    for _ in range(probes):
        now += failed_probe(lane, now)
    lane.admit_call(now)

    assert lane.admit_call(now + 29) == 1
    assert lane.admit_call(now + 30) == 0
