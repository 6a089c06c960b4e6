"""Compare the stack with its peers: same due times for each, then read the lateness."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import psutil
import redis
from django.conf import settings

from benchmarks import measurements, workload
from benchmarks.environment import Bench, processor_seconds, resident_mb, wait_until
from benchmarks.measurements import Reading
from benchmarks.peers import article

WARM_UP = 200
END_TIME_LIMIT = 180.0
LEAD = 0.5  #: seconds from the start of the window to the first due time, equal for all
PLANNING = 14.0  #: seconds in which the rows are written
PAUSE = 0.01  #: seconds between checks for the end of the last call, equal for all
Offsets = Sequence[float]  #: seconds from the first due time
Programs = Mapping[str, psutil.Process]


def run_alternating(repetition: int, *contestants: Callable[[], Reading]) -> list[Reading]:
    """Run each contestant once. The order rotates with each repetition, so that none always follows the same one."""
    order = [(repetition + place) % len(contestants) for place in range(len(contestants))]
    found = {number: contestants[number]() for number in order}
    return [found[number] for number in range(len(contestants))]


def measure_aftertouch(
    bench: Bench, offsets: Offsets, *, customers: int, nodes: int = 1, waiting: int = 0, ended: int = 0,
    analyze: bool = True, conditions: dict[str, Any] | None = None,
) -> Reading:  # fmt: skip
    """Measure the stack: complete ledger, all guards, log channel, beside `ended` and `waiting` rows.

    `conditions` are those of `workload.create_matrix`.

    Processor time covers the dispatch of the calls, and the window from `LEAD` before the first due time to the end.
    The idle time between both is excluded.
    """
    cells = workload.create_matrix(nodes=nodes, conditions=conditions)
    with bench.core() as (worker, ticks):
        warm_up(cells[0], tagged=conditions is not None)
        workload.delete_all()
        workload.create_customers(customers, tagged=conditions is not None)
        if ended:
            workload.fill_ended(ended, cells[0], customers=customers, analyze=analyze)
        if waiting:
            workload.plan_over_a_week(waiting, cells[0], customers=customers, analyze=analyze)
        # The rows are written before they enter the horizon, so that no dispatch precedes its measurement.
        horizon = settings.AFTERTOUCH_HORIZON.total_seconds()
        begins_at = time.time() + PLANNING + horizon
        due_at = [datetime.fromtimestamp(begins_at + offset, UTC) for offset in offsets]
        plans = [
            workload.Plan(customer=number % customers + 1, node=cells[number // customers % nodes], due_at=each)
            for number, each in enumerate(due_at)
        ]
        workload.plan_touches(plans, analyze=analyze)
        if time.time() > begins_at - horizon - 0.5:
            raise TimeoutError("planning took so long that the first calls are in the horizon already")
        involved = {"worker": worker, "ticks": ticks, **bench.servers}
        _sleep_until(begins_at - horizon - 0.5)
        before = _seconds_by_program(involved)
        wait_until(lambda: workload.is_dispatched_ahead(due_at), horizon - 2, "the dispatch")
        time.sleep(LEAD)  # rows are committed before their messages are published
        dispatch = _seconds_since(before, involved)
        worker_mb, broker_mb = resident_mb([worker]), resident_mb([bench.servers["Valkey"]])
        if time.time() > begins_at - LEAD:
            raise TimeoutError("the dispatch was not done before the first was due")
        ended_at, spent_since = _measure_window(begins_at, offsets, involved, workload.all_calls_ended)
        cpu = {name: dispatch[name] + spent_since[name] for name in involved}
        return measurements.read_touches(begins_at, ended_at, cpu=cpu, worker_mb=worker_mb, broker_mb=broker_mb)


def warm_up(node: workload.Node, *, tagged: bool = False) -> None:
    """Make both processes connect and read the matrix before the measurement."""
    workload.delete_all()
    workload.create_customers(WARM_UP, tagged=tagged)
    now = datetime.now(UTC)
    workload.plan_touches([workload.Plan(number + 1, node, now) for number in range(WARM_UP)])
    workload.await_finished(60)


def measure_article(bench: Bench, offsets: Offsets) -> Reading:
    url = bench.redis_url(1)
    with redis.Redis.from_url(url) as client, bench.running("benchmarks.peers.article", url) as program:
        client.flushdb()
        client.zadd(article.DUE, {f"warm-{number}": time.time() for number in range(WARM_UP)})
        wait_until(lambda: client.llen(article.LATENESS) >= WARM_UP, 30, "the article's dispatcher")
        begins_at = time.time() + 5
        client.zadd(article.DUE, {f"call-{number}": begins_at + each for number, each in enumerate(offsets)})
        involved = {"dispatcher": program, "Valkey": bench.servers["Valkey"]}
        return _collect(client, article.LATENESS, begins_at, offsets, involved)


def measure_plain_celery(bench: Bench, offsets: Offsets) -> Reading:
    url = bench.redis_url(2)
    env = {"PLAIN_CELERY_URL": url}
    words = ("celery", "-A", "benchmarks.peers.plain_celery", "worker", "-c", "2", "-l", "WARNING")
    from benchmarks.peers import plain_celery

    plain_celery.app.conf.broker_url = url
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        with bench.running(*words, env=env) as worker:
            warmed_at = time.time()
            for _ in range(WARM_UP):
                plain_celery.handle.delay(time.time())
            publishing = (time.time() - warmed_at) / WARM_UP * len(offsets)
            wait_until(lambda: client.llen(plain_celery.LATENESS) >= WARM_UP, 60, "plain Celery")
            # Publishing takes time, and then the worker reads all messages into memory. Twice the time of the
            # warm-up, because a shared machine may slow down in between.
            begins_at = time.time() + 5 + max(len(offsets) / 800, 2 * publishing)
            for each in offsets:
                eta = datetime.fromtimestamp(begins_at + each, UTC)
                plain_celery.handle.apply_async((begins_at + each,), eta=eta)
            if time.time() > begins_at:
                raise TimeoutError("plain Celery was not done publishing before the first was due")
            involved = {"worker": worker, "Valkey": bench.servers["Valkey"]}
            return _collect(client, plain_celery.LATENESS, begins_at, offsets, involved)


def _collect(client: redis.Redis, key: str, begins_at: float, offsets: Offsets, involved: Programs) -> Reading:
    count = len(offsets) + WARM_UP
    ended_at, cpu = _measure_window(begins_at, offsets, involved, lambda: client.llen(key) >= count)
    lateness = [float(each) for each in client.lrange(key, WARM_UP, -1)]
    return Reading(lateness, len(offsets) / (ended_at - begins_at), cpu=cpu)


def _measure_window(
    begins_at: float, offsets: Offsets, involved: Programs, happened: Callable[[], bool]
) -> tuple[float, dict[str, float]]:
    """Wait for the end of the calls. Return its time and the processor time from `LEAD` before the first due time."""
    _sleep_until(begins_at - LEAD)
    before = _seconds_by_program(involved)
    _sleep_until(begins_at + max(offsets))
    wait_until(happened, END_TIME_LIMIT, "the calls", pause=PAUSE)
    return time.time(), _seconds_since(before, involved)


def _sleep_until(at: float) -> None:
    time.sleep(max(at - time.time(), 0))


def _seconds_by_program(involved: Programs) -> dict[str, float]:
    return {name: processor_seconds([program]) for name, program in involved.items()}


def _seconds_since(before: Mapping[str, float], involved: Programs) -> dict[str, float]:
    return {name: seconds - before[name] for name, seconds in _seconds_by_program(involved).items()}
