"""Our stack and its peers before the same calls: give each the same due times, wait, read how late they were."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import psutil
import redis

from benchmarks import readings, workload
from benchmarks.bench import Bench, resident, spent, wait_until
from benchmarks.peers import article
from benchmarks.readings import Reading

WARM_UP = 200
PATIENCE = 180.0
Offsets = Sequence[float]  #: seconds from the first due time
Programs = Mapping[str, psutil.Process]


def ours(
    bench: Bench, offsets: Offsets, *, customers: int, nodes: int = 1, waiting: int = 0, lead: float = 14.0
) -> Reading:
    """Full ledger, all guards, log channel. The rows are there before the tick that hands them over."""
    cells = workload.matrix(nodes=nodes)
    with bench.core() as worker:
        warm_up(cells[0])
        workload.clear()
        workload.customers(customers)
        if waiting:
            workload.wait_for_days(waiting, cells[0], customers=customers)
        begins_at = time.time() + lead
        plans = [
            workload.Plan(
                customer=number % customers + 1,
                node=cells[number // customers % nodes],
                due_at=datetime.fromtimestamp(begins_at + offset, UTC),
            )
            for number, offset in enumerate(offsets)
        ]
        workload.plan(plans)
        if time.time() > begins_at - 6:
            raise TimeoutError("planning took so long that no tick is left before the first is due")
        time.sleep(max(begins_at - time.time() - 0.5, 0))
        involved = {"worker": worker, **bench.servers}
        before, worker_mb, broker_mb = _spent(involved), resident([worker]), resident([bench.servers["Valkey"]])
        time.sleep(max(begins_at + max(offsets) - time.time(), 0) + 0.5)
        workload.await_finished(PATIENCE)
        burnt = _since(before, involved)
        return replace(readings.of_touches(), cpu=burnt, worker_mb=worker_mb, broker_mb=broker_mb)


def warm_up(node: workload.Node) -> None:
    """Both processes have connected and read the matrix before anything is measured."""
    workload.clear()
    workload.customers(WARM_UP)
    now = datetime.now(UTC)
    workload.plan([workload.Plan(number + 1, node, now) for number in range(WARM_UP)])
    workload.await_finished(60)


def by_article(bench: Bench, offsets: Offsets) -> Reading:
    url = bench.redis_url(1)
    with redis.Redis.from_url(url) as client, bench.running("benchmarks.peers.article", url) as program:
        client.flushdb()
        client.zadd(article.DUE, {f"warm-{number}": time.time() for number in range(WARM_UP)})
        wait_until(lambda: client.llen(article.LATENESS) >= WARM_UP, 30, "the article's dispatcher")
        begins_at = time.time() + 5
        client.zadd(article.DUE, {f"call-{number}": begins_at + each for number, each in enumerate(offsets)})
        involved = {"dispatcher": program, "Valkey": bench.servers["Valkey"]}
        return _collect(client, article.LATENESS, begins_at, offsets, involved)


def by_plain_celery(bench: Bench, offsets: Offsets) -> Reading:
    url = bench.redis_url(2)
    env = {"PLAIN_CELERY_URL": url}
    words = ("celery", "-A", "benchmarks.peers.plain_celery", "worker", "-c", "2", "-l", "WARNING")
    from benchmarks.peers import plain_celery

    plain_celery.app.conf.broker_url = url
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        with bench.running(*words, env=env) as worker:
            for _ in range(WARM_UP):
                plain_celery.handle.delay(time.time())
            wait_until(lambda: client.llen(plain_celery.LATENESS) >= WARM_UP, 60, "plain Celery")
            # Publishing takes it a while, and then its worker has to take it all into memory.
            begins_at = time.time() + 5 + len(offsets) / 800
            for each in offsets:
                eta = datetime.fromtimestamp(begins_at + each, UTC)
                plain_celery.handle.apply_async((begins_at + each,), eta=eta)
            if time.time() > begins_at:
                raise TimeoutError("plain Celery was not done publishing before the first was due")
            involved = {"worker": worker, "Valkey": bench.servers["Valkey"]}
            return _collect(client, plain_celery.LATENESS, begins_at, offsets, involved)


def _collect(client: redis.Redis, key: str, begins_at: float, offsets: Offsets, involved: Programs) -> Reading:
    count = len(offsets) + WARM_UP
    time.sleep(max(begins_at - time.time() - 0.5, 0))
    before = _spent(involved)
    time.sleep(max(begins_at + max(offsets) - time.time(), 0))
    ended_at = _until(lambda: client.llen(key) >= count)
    lateness = [float(each) for each in client.lrange(key, WARM_UP, -1)]
    return Reading(lateness, len(offsets) / (ended_at - begins_at), cpu=_since(before, involved))


def _spent(involved: Programs) -> dict[str, float]:
    return {name: spent([program]) for name, program in involved.items()}


def _since(before: Mapping[str, float], involved: Programs) -> dict[str, float]:
    return {name: seconds - before[name] for name, seconds in _spent(involved).items()}


def _until(happened: Callable[[], bool]) -> float:
    wait_until(happened, PATIENCE, "a peer", pause=0.02)
    return time.time()
