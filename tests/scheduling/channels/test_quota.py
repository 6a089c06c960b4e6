from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from redis import Redis
from redis.connection import Connection

from config.local.processes import select_port
from scheduling.channels.base import Quota
from scheduling.channels.quota import UNAVAILABLE_DELAY, Grant, QuotaGate

ZERO = timedelta(0)
MINUTE = timedelta(minutes=1)
TWENTY = (Quota(20, MINUTE),)
KEY = "wecom:https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=secret"


@pytest.fixture
def server(valkey_url: str) -> Iterator[Redis]:
    with Redis.from_url(valkey_url, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def gate(server: Redis, valkey_url: str) -> Iterator[QuotaGate]:
    made = QuotaGate.connect(valkey_url, margin=ZERO)
    yield made
    made.close()


def test_quota_grants_limit_and_next_free_time(gate: QuotaGate) -> None:
    assert gate.acquire(TWENTY, {KEY: 15}) == {KEY: Grant(15, ZERO)}

    grant = gate.acquire(TWENTY, {KEY: 15})[KEY]

    assert grant.granted == 5
    assert timedelta(seconds=30) < grant.next_in <= MINUTE
    assert gate.acquire(TWENTY, {KEY: 1})[KEY].granted == 0
    assert gate.acquire(TWENTY, {"another": 1})["another"].granted == 1


def test_quota_32_racing_workers_get_exactly_the_limit(server: Redis, valkey_url: str) -> None:
    gates = [QuotaGate.connect(valkey_url) for _ in range(32)]
    start = threading.Barrier(32)

    def race(gate: QuotaGate) -> int:
        start.wait()
        return sum(gate.acquire(TWENTY, {KEY: 1})[KEY].granted for _ in range(10))

    with ThreadPoolExecutor(32) as threads:
        granted = sum(threads.map(race, gates))
    for gate in gates:
        gate.close()

    assert granted == 20


def test_quota_window_never_exceeds_the_limit(gate: QuotaGate, server: Redis) -> None:
    """Ask as fast as possible for two seconds' worth of windows, and check every grant by the server's own clock."""
    quota = (Quota(5, timedelta(milliseconds=50)), Quota(12, timedelta(milliseconds=200)))
    granted_at: list[tuple[int, int]] = []
    while len(granted_at) < 40:
        before = _microseconds(server)
        count = gate.acquire(quota, {KEY: 3})[KEY].granted
        granted_at += [(before, _microseconds(server))] * count

    for limit, window in ((5, 50_000), (12, 200_000)):
        for first, one_too_many in zip(granted_at, granted_at[limit:], strict=False):
            assert one_too_many[1] - first[0] >= window, (limit, window)


def test_quota_tighter_limit_decides(gate: QuotaGate) -> None:
    feishu = (Quota(100, MINUTE), Quota(5, timedelta(seconds=1)))

    grant = gate.acquire(feishu, {KEY: 50})[KEY]

    assert grant.granted == 5
    assert ZERO < grant.next_in <= timedelta(seconds=1)


def test_quota_slot_is_free_at_the_stated_time(gate: QuotaGate, server: Redis) -> None:
    quota = (Quota(1, timedelta(milliseconds=30)),)
    gate.acquire(quota, {KEY: 1})
    wait = gate.acquire(quota, {KEY: 1})[KEY].next_in / timedelta(microseconds=1)
    free_at = _microseconds(server) + wait

    while _microseconds(server) <= free_at:
        pass

    assert gate.acquire(quota, {KEY: 1})[KEY].granted == 1


def test_quota_many_targets_take_one_round_trip(gate: QuotaGate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.acquire(TWENTY, {KEY: 1})
    trips: list[object] = []
    send = Connection.send_packed_command

    def counted(self: Connection, command: object, check_health: bool = True) -> None:
        trips.append(command)
        send(self, command, check_health)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(Connection, "send_packed_command", counted)

    grants = gate.acquire(TWENTY, {f"robot-{number}": number for number in range(100)})

    assert [grants[f"robot-{number}"].granted for number in range(100)] == [min(number, 20) for number in range(100)]
    assert len(trips) == 1


def test_quota_request_for_nothing_stores_nothing(gate: QuotaGate, server: Redis) -> None:
    assert gate.acquire(TWENTY, {KEY: 0}) == {KEY: Grant(0, ZERO)}
    assert gate.acquire(TWENTY, {}) == {}
    assert server.keys() == []


def test_quota_keys_share_slot_hide_url_and_expire(gate: QuotaGate, server: Redis) -> None:
    gate.acquire(TWENTY, {KEY: 3})
    gate.throttle(KEY, MINUTE)

    keys = sorted(map(str, server.keys()))
    assert [key.rpartition(":")[2] for key in keys] == ["log", "mute"]
    assert len({key[key.index("{") : key.index("}")] for key in keys}) == 1
    assert all(key.startswith("at:quota:{") and "secret" not in key for key in keys)
    assert all(0 < server.pttl(key) <= 61_000 for key in keys)


def test_quota_muted_target_gets_no_grant(gate: QuotaGate) -> None:
    assert gate.throttle(KEY, timedelta(minutes=10))

    grant = gate.acquire(TWENTY, {KEY: 1})[KEY]

    assert grant.granted == 0
    assert timedelta(minutes=9) < grant.next_in <= timedelta(minutes=10)


def test_quota_script_is_reloaded_after_flush(gate: QuotaGate, server: Redis) -> None:
    gate.acquire(TWENTY, {KEY: 1})
    server.script_flush()

    assert gate.acquire(TWENTY, {KEY: 1, "b": 2}) == {KEY: Grant(1, ZERO), "b": Grant(2, ZERO)}


def test_quota_clock_set_back_shortens_no_window(gate: QuotaGate, server: Redis) -> None:
    gate.acquire(TWENTY, {KEY: 20})
    (name,) = server.keys()
    ahead = [int(instant) + 600_000_000 for instant in server.lrange(name, 0, -1)]
    server.delete(name)
    server.rpush(name, *ahead)

    assert gate.acquire(TWENTY, {KEY: 1})[KEY].granted == 0


def test_quota_wrong_key_type_grants_nothing(gate: QuotaGate, server: Redis) -> None:
    gate.acquire(TWENTY, {KEY: 1})
    (name,) = server.keys()
    server.set(name, "x")

    assert gate.acquire(TWENTY, {KEY: 1, "b": 1}) == {KEY: Grant(0, UNAVAILABLE_DELAY), "b": Grant(1, ZERO)}


def test_quota_empty_list_needs_no_redis() -> None:
    gate = QuotaGate.connect(f"redis://127.0.0.1:{select_port()}/0")

    assert gate.acquire((), {KEY: 1000}) == {KEY: Grant(1000, ZERO)}
    gate.close()


def test_quota_without_redis_grants_nothing() -> None:
    gate = QuotaGate.connect(f"redis://127.0.0.1:{select_port()}/0")

    assert gate.acquire(TWENTY, {KEY: 1}) == {KEY: Grant(0, UNAVAILABLE_DELAY)}
    assert not gate.throttle(KEY, MINUTE)
    gate.close()


def test_quota_silent_redis_times_out(settings: Any) -> None:
    settings.TIMEOUTS = replace(settings.TIMEOUTS, redis_quota=0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gate = QuotaGate.connect(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")

        assert gate.acquire(TWENTY, {KEY: 1}) == {KEY: Grant(0, UNAVAILABLE_DELAY)}

        connection, _ = silent.accept()
        with connection:
            connection.settimeout(20)
            while connection.recv(4096):  # it asked, and hung up without an answer
                pass
        gate.close()


def test_quota_margin_widens_each_window(server: Redis, valkey_url: str) -> None:
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


def _microseconds(server: Redis) -> int:
    seconds, microseconds = server.time()
    return int(seconds * 1_000_000 + microseconds)
