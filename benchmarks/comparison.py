"""Compare the stack with its peers: the same call at the same due times for each, to the same receiver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from types import ModuleType
from typing import Any

import psutil
import redis
from django.conf import settings

from benchmarks import workload
from benchmarks.environment import Bench, processor_seconds, resident_mb, wait_until
from benchmarks.measurements import Reading
from benchmarks.nginx import Nginx, running_nginx
from benchmarks.peers import article, dramatiq_delay, plain_celery
from benchmarks.peers.call import BROKER, RECEIVER, SECRET
from scheduling.models import Touch

WARM_UP = 200
END_TIME_LIMIT = 180.0
LEAD = 0.5  #: seconds from the start of the window to the first due time, equal for all
PLANNING = 14.0  #: seconds in which the rows are written
PAUSE = 0.01  #: seconds between checks for the end of the last call, equal for all
LOG_TIME_LIMIT = 5.0  #: seconds in which the receiver writes its log after the last answer
Offsets = Sequence[float]  #: seconds from the first due time, in whole milliseconds as the receiver's log
Programs = Mapping[str, psutil.Process]


def measure_contestants(bench: Bench, repetition: int, offsets: Offsets) -> dict[str, Reading]:
    """Measure Aftertouch ("ours") and each peer once, by name."""
    contestants = {
        "ours": partial(measure_aftertouch, bench, offsets, customers=len(offsets)),
        "the article's": partial(measure_article, bench, offsets),
        "plain Celery": partial(measure_queue, bench, offsets, plain_celery),
        "Dramatiq": partial(measure_queue, bench, offsets, dramatiq_delay),
    }
    return dict(zip(contestants, run_alternating(repetition, *contestants.values()), strict=True))


def run_alternating(repetition: int, *contestants: Callable[[], Reading]) -> list[Reading]:
    """Run each contestant once. The order rotates with each repetition, so that none always follows the same one."""
    count = len(contestants)
    readings = {number: contestants[number]() for number in ((repetition + place) % count for place in range(count))}
    return [readings[number] for number in range(count)]


def add_calls(bench: Bench, scenario: str, name: str, reading: Reading, *, goal_p99: float | None = None) -> None:
    """Add what is measured of the calls of each contestant. Only Aftertouch ("ours") has goals."""
    add, none = bench.figures.add, 0 if name == "ours" else None
    for share in (50, 99, 100):
        goal = goal_p99 if share == 99 else None
        add(scenario, f"{name}: lateness p{share}", reading.milliseconds(share), "ms", goal=goal)
    add(scenario, f"{name}: early", reading.early, "calls", goal=none)
    add(scenario, f"{name}: missing", reading.missing, "calls", goal=none)
    add(scenario, f"{name}: twice", reading.repeated, "calls", goal=none)
    add(scenario, f"{name}: load of the receiver", reading.receiver_load, "% of a core", note="in no processor time")


def measure_aftertouch(
    bench: Bench, offsets: Offsets, *, customers: int, nodes: int = 1, waiting: int = 0, ended: int = 0,
    analyze: bool = True, conditions: dict[str, Any] | None = None,
) -> Reading:  # fmt: skip
    """Measure the stack: complete ledger, all guards, webhook channel, beside `ended` and `waiting` rows.

    `conditions` are those of `workload.create_matrix`.

    Processor time covers the dispatch of the calls, and the window from `LEAD` before the first due time to the end.
    The idle time between both is excluded.
    """
    with running_nginx(bench) as nginx:
        config = {"url": nginx.url, "secret": SECRET}
        cells = workload.create_matrix(nodes=nodes, channel="webhook", config=config, conditions=conditions)
        with bench.core() as (worker, ticks):
            warm_up(cells[0], tagged=conditions is not None)
            nginx.forget()
            workload.delete_all()
            workload.create_customers(customers, tagged=conditions is not None)
            if ended:
                workload.fill_ended(ended, cells[0], customers=customers, analyze=analyze)
            if waiting:
                workload.plan_over_a_week(waiting, cells[0], customers=customers, analyze=analyze)
            # The rows are written before they enter the horizon, so that no dispatch precedes its measurement.
            horizon = settings.AFTERTOUCH_HORIZON.total_seconds()
            begins_at = _next_second(PLANNING + horizon)
            due_at = [datetime.fromtimestamp(begins_at + offset, UTC) for offset in offsets]
            plans = [
                workload.Plan(customer=number % customers + 1, node=cells[number // customers % nodes], due_at=instant)
                for number, instant in enumerate(due_at)
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
            memory = {"worker_mb": resident_mb([worker]), "broker_mb": resident_mb([bench.servers["Valkey"]])}
            if time.time() > begins_at - LEAD:
                raise TimeoutError("the dispatch was not done before the first was due")
            return _measure_calls(
                nginx, begins_at, offsets, involved,
                has_ended=workload.all_calls_ended, read_due=lambda: _read_delivered(begins_at),
                spent=dispatch, **memory,
            )  # fmt: skip


def _read_delivered(begins_at: float) -> dict[str, float]:
    """Return the due times of the delivered touches by `webhook-id`."""
    planned_at = datetime.fromtimestamp(begins_at, UTC)
    delivered = Touch.objects.filter(state="delivered", planned_at__gte=planned_at)
    return {str(key): at.timestamp() for key, at in delivered.values_list("root_id", "planned_at")}


def warm_up(node: workload.Node, *, tagged: bool = False) -> None:
    """Make both processes connect and read the matrix before the measurement."""
    workload.delete_all()
    workload.create_customers(WARM_UP, tagged=tagged)
    now = datetime.now(UTC)
    workload.plan_touches([workload.Plan(number + 1, node, now) for number in range(WARM_UP)])
    workload.await_finished(60)


def measure_article(bench: Bench, offsets: Offsets) -> Reading:
    with redis.Redis.from_url(BROKER) as client, running_nginx(bench) as nginx:
        client.flushdb()
        with bench.running("benchmarks.peers.article", env={RECEIVER: nginx.url}) as program:
            client.zadd(article.DUE, {f"warm-{number}": time.time() for number in range(WARM_UP)})
            wait_until(lambda: nginx.read_log() >= WARM_UP, 30, "the article's dispatcher")
            nginx.forget()
            begins_at = _next_second(5)
            client.zadd(article.DUE, _name_calls(begins_at, offsets))
            return _measure_peer(bench, nginx, begins_at, offsets, program)


def measure_queue(bench: Bench, offsets: Offsets, peer: ModuleType) -> Reading:
    """Measure a peer whose module has the words of its `WORKER` and a function `plan_call`."""
    with redis.Redis.from_url(BROKER) as client, running_nginx(bench) as nginx:
        client.flushdb()
        with bench.running(*peer.WORKER, env={RECEIVER: nginx.url}) as worker:
            warmed_at = time.time()
            for number in range(WARM_UP):
                peer.plan_call(f"warm-{number}", time.time())
            publishing = (time.time() - warmed_at) / WARM_UP * len(offsets)
            wait_until(lambda: nginx.read_log() >= WARM_UP, 60, peer.__name__)
            nginx.forget()
            # Publishing takes time, and then the worker reads all messages into memory. Twice the time of the
            # warm-up, because a shared machine may slow down in between.
            begins_at = _next_second(5 + max(len(offsets) / 800, 2 * publishing))
            for name, due_at in _name_calls(begins_at, offsets).items():
                peer.plan_call(name, due_at)
            if time.time() > begins_at:
                raise TimeoutError(f"{peer.__name__} was not done publishing before the first was due")
            return _measure_peer(bench, nginx, begins_at, offsets, worker)


def _name_calls(begins_at: float, offsets: Offsets) -> dict[str, float]:
    """Return the due times of a peer's calls by `webhook-id`."""
    return {f"call-{number}": begins_at + offset for number, offset in enumerate(offsets)}


def _measure_peer(bench: Bench, nginx: Nginx, begins_at: float, offsets: Offsets, program: psutil.Process) -> Reading:
    return _measure_calls(
        nginx, begins_at, offsets, {"program": program, "Valkey": bench.servers["Valkey"]},
        has_ended=lambda: nginx.read_log() >= len(offsets), read_due=lambda: _name_calls(begins_at, offsets),
    )  # fmt: skip


def _measure_calls(
    nginx: Nginx, begins_at: float, offsets: Offsets, involved: Programs, *, has_ended: Callable[[], bool],
    read_due: Callable[[], Mapping[str, float]], spent: Mapping[str, float] | None = None, **memory: float,
) -> Reading:  # fmt: skip
    """Wait for the end of the calls, and read what the receiver got of those that `read_due` names by `webhook-id`.

    Processor time counts from `LEAD` before the first due time to the end, and what was `spent` before.
    """
    programs = {**involved, "receiver": nginx.process}
    _sleep_until(begins_at - LEAD)
    before = _seconds_by_program(programs)
    _sleep_until(begins_at + max(offsets))
    wait_until(has_ended, END_TIME_LIMIT, "the calls", pause=PAUSE)
    seconds = time.time() - begins_at
    cpu = _seconds_since(before, programs)
    receiver_load = cpu.pop("receiver") / seconds * 100
    due_at = read_due()
    with suppress(TimeoutError):  # calls that are missing
        wait_until(lambda: nginx.read_log() >= len(due_at), LOG_TIME_LIMIT, "the log")
    requests = sum(map(len, nginx.arrivals.values()))
    lateness = [
        (nginx.arrivals[name][0] - round(at * 1000)) / 1000 for name, at in due_at.items() if name in nginx.arrivals
    ]
    return Reading(
        lateness, len(due_at) - len(lateness), requests - len(lateness), len(offsets) / seconds,
        {name: used + (spent or {}).get(name, 0.0) for name, used in cpu.items()}, receiver_load, **memory,
    )  # fmt: skip


def _next_second(seconds: float) -> float:
    """Return the first whole second that is `seconds` ahead: due times are whole milliseconds, as those of the log."""
    return float(math.ceil(time.time() + seconds))


def _sleep_until(at: float) -> None:
    time.sleep(max(at - time.time(), 0))


def _seconds_by_program(involved: Programs) -> dict[str, float]:
    return {name: processor_seconds([program]) for name, program in involved.items()}


def _seconds_since(before: Mapping[str, float], involved: Programs) -> dict[str, float]:
    return {name: seconds - before[name] for name, seconds in _seconds_by_program(involved).items()}
