"""Measure live chats: the cost of a frame and a session, and the time from a silence to its guide message."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import cycle

import redis
from django.db import connection

from benchmarks import chats, measurements, workload
from benchmarks.environment import Bench, processor_seconds, wait_until
from benchmarks.peers import key_expiry
from benchmarks.results import percentile
from sessions.frames import Frame
from sessions.store.sessions import Store
from sessions.store.stats import running_watchers

WATCHER = ("manage", "watch_sessions")
RATE = 1_600
CONNECTIONS = 4
GOAL_FRAMES, GOAL_BYTES, GOAL_IDLE, GOAL_NOTICED, GOAL_DELIVERED, GOAL_COST = 35_000, 600, 1.0, 100.0, 250.0, 400.0
KINDS = ("ping", "ping", "message", "ping", "ping", "typing", "ping", "ping", "agent", "ping")


def silence(bench: Bench) -> None:
    chats.store_policies()
    for count in (10_000, 100_000, 1_000_000):
        if count <= bench.size(1_000_000, 10_000):
            _measure_store(bench, count)
    count, seconds = bench.size(100_000, 5_000), bench.size(30, 4)
    for others in (0,) if bench.quick else (0, 1_000_000):
        for _ in range(bench.repeat):
            _measure_silences(bench, count, seconds, others)
            _measure_listener(bench, count, seconds, others)


# --- cost ---------------------------------------------------------------------------------------------------------


def _measure_store(bench: Bench, count: int) -> None:
    store = chats.open_store(bench.endpoints.redis_url)
    client = store.server.client
    client.flushall()
    store.push(store.policies())
    before = chats.stable_memory(client)
    sessions = chats.make_ids(count, bench.random)
    chats.fill_sessions(store, sessions)
    while users := store.active_users(10_000):  # as watchers do within minutes
        store.clear_active(users)
    used = (chats.stable_memory(client) - before) / count
    size = f"{count:,} sessions"
    bench.figures.add("silence", f"{size}: memory each", used, "B", goal=GOAL_BYTES, note="ids of 36 characters")
    goal = GOAL_FRAMES if count == 100_000 else None
    for _ in range(bench.repeat):
        noted = _frames_a_second(bench, store, sessions)
        bench.figures.add(
            "silence", f"{size}: frames", noted, "/s", goal=goal, at_least=True, note=f"{CONNECTIONS} connections"
        )
    took = []
    for _ in range(100):
        began_at = time.perf_counter()
        store.claim_silent(32, timedelta(seconds=1))
        took.append((time.perf_counter() - began_at) * 1000)
    bench.figures.add("silence", f"{size}: a look that finds nothing", percentile(took, 50), "ms")
    if count == bench.size(100_000, 10_000):
        _measure_idle(bench)
    client.flushall()
    client.close()


def _frames_a_second(bench: Bench, store: Store, sessions: list[str]) -> float:
    """Return frames per second. Seven of ten frames are pings; all have a seq. Connections work concurrently."""
    total = bench.size(300_000, 20_000)
    kinds, number = cycle(KINDS), time.time_ns()
    frames = []
    for at in range(total):
        each, kind = sessions[at % len(sessions)], next(kinds)
        side, kind_sent = ("agent", "message") if kind == "agent" else ("user", kind)
        frames.append(
            Frame(each, each[::-1], each, sender=side, kind=kind_sent, seq=(number + at) % 2**52, tag=chats.LONG)
        )
    batches = [frames[at : at + chats.BATCH] for at in range(0, total, chats.BATCH)]
    began_at = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        parts = [
            pool.submit(lambda mine: [*map(store.note_activity, mine)], batches[n::CONNECTIONS])
            for n in range(CONNECTIONS)
        ]
        assert sum(len(noted) for part in parts for noted in part.result()) == total
    return total / (time.perf_counter() - began_at)


def _measure_idle(bench: Bench) -> None:
    seconds = bench.size(30, 5)
    with bench.running(*WATCHER) as watcher:
        _await_watcher(bench)
        time.sleep(5)
        before = processor_seconds([watcher])
        time.sleep(seconds)
        burnt = (processor_seconds([watcher]) - before) / seconds * 100
    bench.figures.add("silence", "an idle watcher", burnt, "% of a core", goal=GOAL_IDLE, note=f"over {seconds} s")


# --- lateness -----------------------------------------------------------------------------------------------------


def _measure_silences(bench: Bench, count: int, seconds: float, others: int) -> None:
    """Measure from the deadline, by the store's clock, to the row of the event, and to the channel."""
    _change_guide_node()
    store = chats.open_store(bench.endpoints.redis_url)
    store.server.client.flushdb()
    chats.fill_others(store.server.client, others)
    live = chats.make_ids(count, bench.random)
    chats.fill_sessions(store, live)
    with bench.core() as (worker, ticks), bench.running(*WATCHER) as watcher:
        _await_watcher(bench)
        with chats.Traffic(bench.endpoints.redis_url, [], rate=400, seconds=2) as warm_up:
            pass
        _await_end(warm_up.fell_silent)
        workload.delete_all()
        _create_silent_customers(RATE * int(seconds) + 1_000)
        involved = [worker, ticks, watcher, *bench.servers.values()]
        before = processor_seconds(involved)
        with chats.Traffic(bench.endpoints.redis_url, live, rate=RATE, seconds=seconds) as traffic:
            pass
        _await_end(traffic.fell_silent)
        burnt = processor_seconds(involved) - before
    _add_silences(
        bench, traffic.fell_silent, f"{count:,} live, {RATE:,} silent a second", _describe_others(others), burnt
    )
    store.server.client.flushdb()
    store.server.client.close()


def _add_silences(bench: Bench, count: int, note: str, suffix: str, burnt: float) -> None:
    noticed, delivered = _detection_delays(), measurements.read_lateness()
    add, who = bench.figures.add, f"ours{suffix}"
    for share in (50, 99):
        last = share == 99
        add(
            "silence", f"{who}: deadline → recorded: p{share}", percentile(noticed, share) * 1000, "ms",
            goal=GOAL_NOTICED if last else None, note=note if last else "",
        )  # fmt: skip
        add(
            "silence", f"{who}: deadline → channel: p{share}", percentile(delivered, share) * 1000, "ms",
            goal=GOAL_DELIVERED if last else None, note=note if last else "",
        )  # fmt: skip
    add("silence", f"{who}: early", sum(each < 0 for each in noticed), "silences", goal=0)
    add("silence", f"{who}: lost or double", abs(count - len(noticed)) + abs(count - len(delivered)), "", goal=0)
    add(
        "silence", f"{who}: processor time each", burnt / count * 1e6, "µs", goal=GOAL_COST,
        note="pings of the live included",
    )  # fmt: skip


def _create_silent_customers(count: int) -> None:
    """Create the customers that fall silent. The watcher may create those that ping at the same time."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO scheduling_customer (user_id, name, level, locale, timezone, addresses, opted_out, created_at)"
            " SELECT 'user-' || n, 'Customer ' || n, 'normal', 'zh-hans', '', '{}', false, now()"
            " FROM generate_series(1, %s) AS n",
            [count],
        )


def _change_guide_node() -> None:
    """Change the node to the shipped one: an immediate message that counts toward the cap and that no guard stops."""
    (node,) = workload.create_matrix()
    node.template.texts.update(body="您好 {{ user.name }}，您还在吗？")
    node.trigger, node.delay, node.guard_cap = "session.silent", timedelta(0), "count_only"
    node.guard_dedupe = node.guard_conversation = node.guard_quiet_hours = "ignore"
    node.save()


def _await_watcher(bench: Bench) -> None:
    store = chats.open_store(bench.endpoints.redis_url)
    wait_until(lambda: bool(running_watchers(store)), 60, "the watcher")
    store.server.client.close()


def _await_end(count: int) -> None:
    def ended() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM scheduling_event")
            return int(cursor.fetchone()[0]) >= count and workload.count_undecided() == 0

    wait_until(ended, 120, "the silences", pause=0.3)


def _detection_delays() -> list[float]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT extract(epoch FROM received_at - occurred_at)::float8 FROM scheduling_event")
        return [row[0] for row in cursor.fetchall()]


# --- peer ---------------------------------------------------------------------------------------------------------


def _measure_listener(bench: Bench, count: int, seconds: float, others: int) -> None:
    url = bench.redis_url(1)
    total = int(RATE * seconds)
    with redis.Redis.from_url(url) as client, bench.running("benchmarks.peers.key_expiry", url) as listener:
        client.flushdb()
        chats.fill_others(client, others)
        client.config_set("notify-keyspace-events", "Ex")
        wait_until(lambda: bool(client.exists("expired:listening")), 30, "the article's listener")
        begins_at = _write_expiring_keys(client, count, total, seconds)
        before = processor_seconds([listener])
        wait_limit = bench.size(60, 10)
        deadline = begins_at + seconds + wait_limit
        while client.llen(key_expiry.LATENESS) < total and time.time() < deadline:
            time.sleep(0.2)
        late = [float(each) for each in client.lrange(key_expiry.LATENESS, 0, -1)]
        burnt = processor_seconds([listener]) - before
        client.config_set("notify-keyspace-events", "")
        client.flushdb()
    add, who = bench.figures.add, f"the article's{_describe_others(others)}"
    add(
        "silence",
        f"{who}: not heard of",
        (total - len(late)) / total * 100,
        "%",
        note=f"within {wait_limit} s of the last",
    )
    for share in (50, 99):
        add("silence", f"{who}: expiry → heard: p{share}", percentile(late, share) * 1000, "ms")
    add("silence", f"{who}: processor time each", burnt / max(len(late), 1) * 1e6, "µs", note="the listener alone")


def _describe_others(others: int) -> str:
    return f" beside {others / 1e6:g} M other keys" if others else ""


def _write_expiring_keys(client: redis.Redis, live: int, total: int, seconds: float) -> float:
    """Write keys of live sessions, and keys that expire one after another."""
    begins_at = time.time() + 5 + (live + total) / 20_000
    pipe = client.pipeline(transaction=False)
    for number in range(live + total):
        expires_at = begins_at + (number * seconds / total if number < total else 3600)
        pipe.set(key_expiry.key(number, expires_at), 1, pxat=int(expires_at * 1000))
        if number % 1_000 == 999:
            pipe.execute()
    pipe.execute()
    assert time.time() < begins_at
    return begins_at
