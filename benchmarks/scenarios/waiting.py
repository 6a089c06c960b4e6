"""Measure whether touches that wait for days slow down dispatch or use memory."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from django.db import connection, transaction

from benchmarks import comparison, workload
from benchmarks.environment import Bench
from scheduling.dispatch import PASS_LIMIT
from scheduling.ledger.touches import touch_ledger

GOAL_STATEMENT = 50.0
GOAL_P99 = 60.0
STATEMENTS = 10
HORIZON = timedelta(seconds=30)
DUE = 10_000


def waiting(bench: Bench) -> None:
    levels = (0, 10_000) if bench.quick else (0, 10_000, 100_000, 1_000_000)
    for _ in range(bench.repeat):
        for level in levels:
            _measure_statement(bench, level, last=level == levels[-1])
            _measure_lateness(bench, level, last=level == levels[-1])


def _measure_statement(bench: Bench, level: int, *, last: bool) -> None:
    """Measure the dispatch statement without other load."""
    (cell,) = workload.create_matrix()
    workload.create_customers(customers := _customer_count(level))
    if level:
        workload.plan_over_a_week(level, cell, customers=customers)
    due_at = datetime.now(UTC) + timedelta(seconds=20)
    workload.plan_touches([workload.Plan(number + 1, cell, due_at) for number in range(DUE)])
    plan = _explain() if last else ""
    for _ in range(STATEMENTS - 1):
        began_at = time.perf_counter()
        handed_over = len(touch_ledger.dispatch_due(horizon=HORIZON, limit=PASS_LIMIT, window=2 * DUE))
        took = (time.perf_counter() - began_at) * 1000
        assert handed_over == PASS_LIMIT
        bench.figures.add("waiting", f"{level:,} waiting: dispatch {PASS_LIMIT:,}", took, "ms", goal=GOAL_STATEMENT)
    if plan:
        print(plan)


def _customer_count(level: int) -> int:
    """Return enough customers for at most four waiting touches each."""
    return max(DUE, level // 4)


def _explain() -> str:
    """Return the plan of the dispatch statement with its buffers. Rolls back."""
    seen: list[tuple[str, object]] = []

    def note(execute, sql, parameters, many, context):  # type: ignore[no-untyped-def]
        seen.append((sql, parameters))
        return execute(sql, parameters, many, context)

    with transaction.atomic():
        with connection.execute_wrapper(note):
            touch_ledger.dispatch_due(horizon=HORIZON, limit=PASS_LIMIT, window=2 * DUE)
        transaction.set_rollback(True)
    with transaction.atomic(), connection.cursor() as cursor:
        statement, parameters = seen[0]
        cursor.execute("EXPLAIN (ANALYZE, BUFFERS) " + statement, parameters)
        lines = [row[0] for row in cursor.fetchall()]
        transaction.set_rollback(True)
    return "\n".join(lines)


def _measure_lateness(bench: Bench, level: int, *, last: bool) -> None:
    seconds = DUE / 1000
    offsets = [number * seconds / DUE for number in range(DUE)]
    reading = comparison.measure_aftertouch(bench, offsets, customers=_customer_count(level), waiting=level)
    add = bench.figures.add
    add("waiting", f"{level:,} waiting: spread p99", reading.milliseconds(99), "ms", goal=GOAL_P99 if last else None)
    add("waiting", f"{level:,} waiting: processor time each", reading.cpu_each, "µs")
    add("waiting", f"{level:,} waiting: worker's memory", reading.worker_mb, "MB")
    add("waiting", f"{level:,} waiting: broker's memory", reading.broker_mb, "MB")
