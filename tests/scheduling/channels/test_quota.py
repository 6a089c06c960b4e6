import socket
from dataclasses import replace
from datetime import timedelta

import structlog

from config.local.processes import select_port
from scheduling.channels.base import Quota
from scheduling.channels.quota import UNAVAILABLE_DELAY, Grant, QuotaGate
from tests.scheduling.channels.conftest import age_slots
from tests.support.second_connection import run_concurrently

ZERO, MILLISECOND = timedelta(0), timedelta(milliseconds=1)
MICROSECOND, MINUTE, HOUR = timedelta(microseconds=1), timedelta(minutes=1), timedelta(hours=1)
TWENTY = (Quota(20, MINUTE),)
KEY = "wecom:https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=secret"


def test_quota_grants_limit_and_next_free_time(gate):
    assert gate.acquire(TWENTY, {KEY: 15}) == {KEY: Grant(15, ZERO)}

    grant = gate.acquire(TWENTY, {KEY: 15})[KEY]

    assert grant.granted == 5
    assert timedelta(seconds=30) < grant.next_in <= MINUTE
    assert gate.acquire(TWENTY, {KEY: 1})[KEY].granted == 0
    assert gate.acquire(TWENTY, {"another": 1})["another"].granted == 1


def test_quota_32_racing_workers_get_exactly_the_limit(server, valkey_url):
    gates = [QuotaGate.connect(valkey_url) for _ in range(32)]

    def acquire(number):
        return sum(gates[number].acquire(TWENTY, {KEY: 1})[KEY].granted for _ in range(10))

    granted = sum(run_concurrently(32, acquire))
    for gate in gates:
        gate.close()

    assert granted == 20


def test_quota_window_never_exceeds_the_limit(gate, server):
    """Ask as fast as possible for two seconds' worth of windows, and check every grant by the server's own clock."""
    quota = (Quota(5, timedelta(milliseconds=50)), Quota(12, timedelta(milliseconds=200)))
    granted_at = []
    while len(granted_at) < 40:
        before = _microseconds(server)
        count = gate.acquire(quota, {KEY: 3})[KEY].granted
        granted_at += [(before, _microseconds(server))] * count

    for limit, window in ((5, 50_000), (12, 200_000)):
        for first, one_too_many in zip(granted_at, granted_at[limit:], strict=False):
            assert one_too_many[1] - first[0] >= window, (limit, window)


def test_quota_slot_is_free_at_the_stated_time(gate, server):
    quota = (Quota(1, timedelta(milliseconds=30)),)
    while (denied := gate.acquire(quota, {KEY: 1})[KEY]).granted:
        pass  # the first, and one more for each window that the machine stalls
    wait = denied.next_in / MICROSECOND
    free_at = _microseconds(server) + wait

    while _microseconds(server) <= free_at:
        pass

    assert gate.acquire(quota, {KEY: 1})[KEY].granted == 1


def test_quota_muted_target_gets_no_grant_until_its_longest_mute_ends(gate, server):
    gate.acquire(TWENTY, {KEY: 3})
    for minutes in (1, 10, 1):
        assert gate.throttle(KEY, minutes * MINUTE)

    grant = gate.acquire(TWENTY, {KEY: 1})[KEY]

    assert grant.granted == 0
    assert timedelta(minutes=9) < grant.next_in <= timedelta(minutes=10)
    keys = sorted(map(str, server.keys()))
    assert [key.rpartition(":")[2] for key in keys] == ["log", "mute"]
    assert len({key[key.index("{") : key.index("}")] for key in keys}) == 1, "they are on different nodes of a cluster"
    assert not [key for key in keys if "secret" in key]
    assert all(0 < server.pttl(key) <= 600_000 for key in keys)


def test_quota_script_is_reloaded_after_flush(gate, server):
    gate.acquire(TWENTY, {KEY: 1})
    server.script_flush()

    assert gate.acquire(TWENTY, {KEY: 1, "b": 2}) == {KEY: Grant(1, ZERO), "b": Grant(2, ZERO)}


def test_quota_keeps_the_grants_that_another_row_counts(gate, server):
    """Two channel rows with one receiver: the second has a small limit in a short window."""
    gate.acquire((Quota(3, HOUR),), {KEY: 3})
    for _ in range(5):
        assert gate.acquire((Quota(5, MILLISECOND),), {KEY: 1})[KEY].granted == 1
        until = _microseconds(server) + 5_000
        while _microseconds(server) <= until:
            pass

    grant = gate.acquire((Quota(3, HOUR),), {KEY: 1})[KEY]
    assert grant.granted == 0
    assert grant.next_in > HOUR - MINUTE
    (name,) = server.keys()
    assert HOUR - MINUTE < timedelta(milliseconds=server.pttl(name)) <= HOUR + MILLISECOND


def test_moved_slot_of_another_row_keeps_all_grants(gate, server):
    gate.acquire((Quota(3, HOUR),), {KEY: 3})
    short = (Quota(5, MILLISECOND),)
    slot = gate.acquire(short, {KEY: 1})[KEY].slot
    while gate.move(short, KEY, slot)[0] in (0, slot):
        pass

    (name,) = server.keys()
    assert server.llen(name) == 4
    assert timedelta(milliseconds=server.pttl(name)) > HOUR - MINUTE
    assert gate.acquire((Quota(3, HOUR),), {KEY: 1})[KEY].granted == 0


def test_log_of_one_row_is_no_longer_than_its_limit(gate, server):
    quotas = (Quota(3, 2 * MILLISECOND), Quota(20, 20 * MILLISECOND))
    granted = 0
    while granted < 100:
        granted += gate.acquire(quotas, {KEY: 2})[KEY].granted
        assert max(map(server.llen, server.keys()), default=0) <= 20


def test_quota_clock_set_back_shortens_no_window(gate, server):
    gate.acquire(TWENTY, {KEY: 20})
    (name,) = server.keys()
    ahead = [int(instant) + 600_000_000 for instant in server.lrange(name, 0, -1)]
    server.delete(name)
    server.rpush(name, *ahead)

    assert gate.acquire(TWENTY, {KEY: 1})[KEY].granted == 0


def test_quota_wrong_key_type_grants_nothing(gate, server):
    gate.acquire(TWENTY, {KEY: 1})
    (name,) = server.keys()
    server.set(name, "x")

    with structlog.testing.capture_logs() as lines:
        assert gate.acquire(TWENTY, {KEY: 1, "b": 1}) == {KEY: Grant(0, UNAVAILABLE_DELAY), "b": Grant(1, ZERO)}
    assert [(line["event"], line["error"][:9]) for line in lines] == [("quota_script_failed", "WRONGTYPE")]


def test_quota_without_redis_grants_nothing():
    gate = QuotaGate.connect(f"redis://127.0.0.1:{select_port()}/0")

    assert gate.acquire(TWENTY, {KEY: 1}) == {KEY: Grant(0, UNAVAILABLE_DELAY)}
    assert gate.acquire((), {KEY: 1000}) == {KEY: Grant(1000, ZERO)}, "without a quota there is nothing to ask"
    assert not gate.throttle(KEY, MINUTE)
    assert gate.move(TWENTY, KEY, 1) == (0, UNAVAILABLE_DELAY)
    gate.close()


def test_quota_silent_redis_times_out(settings):
    settings.TIMEOUTS = replace(settings.TIMEOUTS, redis_quota=0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gate = QuotaGate.connect(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")

        assert gate.acquire(TWENTY, {KEY: 1}) == {KEY: Grant(0, UNAVAILABLE_DELAY)}

        connection, _ = silent.accept()
        with connection:
            connection.settimeout(60)
            while connection.recv(4096):  # it asked, and hung up without an answer
                pass
        gate.close()


def test_quota_margin_widens_each_window(server, valkey_url):
    """By the slots that are reserved and the server's clock around the question."""
    gate = QuotaGate.connect(valkey_url, margin=timedelta(seconds=2))
    gate.acquire(TWENTY, {KEY: 20})
    (name,) = server.keys()
    free_at = int(server.lrange(name, 0, 0)[0]) + 62_000_000

    before = _microseconds(server)
    next_in = gate.acquire(TWENTY, {KEY: 1})[KEY].next_in // timedelta(microseconds=1)
    after = _microseconds(server)

    assert before <= free_at - next_in <= after
    gate.close()


def _microseconds(server):
    seconds, microseconds = server.time()
    return int(seconds * 1_000_000 + microseconds)


def test_moved_slot_counts_from_now(gate, server):
    quota = (Quota(2, HOUR),)
    slot = gate.acquire(quota, {KEY: 2})[KEY].slot
    age_slots(server, HOUR * 3 / 4)

    moved, wait = gate.move(quota, KEY, slot - HOUR * 3 / 4 // MICROSECOND)

    assert moved >= slot
    assert wait == ZERO
    age_slots(server, HOUR / 2)
    assert gate.acquire(quota, {KEY: 2})[KEY].granted == 1, "the slot that was moved still counts"


def test_slot_moves_only_where_its_window_has_a_place(gate, server):
    quota = (Quota(2, HOUR),)
    late = gate.acquire(quota, {KEY: 2})[KEY].slot - HOUR // MICROSECOND
    age_slots(server, HOUR)
    later = gate.acquire(quota, {KEY: 2})[KEY]
    assert later.granted == 2

    moved, wait = gate.move(quota, KEY, late)

    assert moved == 0
    assert ZERO < wait <= HOUR
    age_slots(server, HOUR)
    assert gate.move(quota, KEY, late - HOUR // MICROSECOND)[0] >= later.slot


def test_muted_target_moves_no_slot(gate):
    slot = gate.acquire(TWENTY, {KEY: 1})[KEY].slot
    gate.throttle(KEY, MINUTE)

    moved, wait = gate.move(TWENTY, KEY, slot)
    assert moved == 0
    assert wait > timedelta(seconds=50)
