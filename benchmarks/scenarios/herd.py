"""Measure whether a backlog of normal touches delays high ones and the periodic passes."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

from django.conf import settings
from django.db import connection
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample

from benchmarks import workload
from benchmarks.comparison import warm_up
from benchmarks.environment import Bench, wait_until
from benchmarks.results import percentile
from scheduling.models import Node
from scheduling.tasks import rescue

HIGH_EACH_SECOND = 20
GOAL_HIGH, GOAL_VERSIONS = 250.0, 1.2
GOAL_GAP = 6.0  #: seconds between two passes; their interval is 5 s
PLANNING = 10.0  #: seconds per 100,000 rows
PROBE = 0.2  #: seconds between two looks at the passes


def herd(bench: Bench) -> None:
    for count in (100_000, 300_000) if not bench.quick else (5_000,):
        for _ in range(bench.repeat):
            alone = _measure_herd(bench, 0, count)
            beside = _measure_herd(bench, count, count)
            bench.figures.add(
                "herd", f"{count:,}: row versions for each delivered touch ÷ without a herd", beside / alone, "×",
                goal=GOAL_VERSIONS,
            )  # fmt: skip


def _measure_herd(bench: Bench, count: int, scale: int) -> float:
    """Return the row versions for each delivered touch. `count` normal touches are due at one moment, high ones evenly
    from 5 s before it until the end. With `count` 0, `scale` / 20 normal ones are due evenly over 20 s instead.
    """
    normal, high = workload.create_matrix(nodes=2)
    Node.objects.filter(pk=high.pk).update(priority=0)
    high.refresh_from_db()
    with bench.core():
        warm_up(normal)
        workload.delete_all()
        evenly = 0 if count else scale // 20
        seconds = 30 + count // 4_000
        workload.create_customers(count + evenly + seconds * HIGH_EACH_SECOND)
        horizon = settings.AFTERTOUCH_HORIZON.total_seconds()
        begins_at = time.time() + PLANNING * (1 + count / 100_000) + horizon
        plans = [_plan(number, normal, begins_at) for number in range(count)]
        plans += [_plan(count + number, normal, begins_at + number * 20 / evenly) for number in range(evenly)]
        plans += [
            _plan(count + evenly + number, high, begins_at - 5 + number / HIGH_EACH_SECOND)
            for number in range(seconds * HIGH_EACH_SECOND)
        ]
        workload.plan_touches(plans)
        versions = _row_versions()
        _sleep_until(begins_at - 5)
        with _PassProbe() as probe:
            _sleep_until(begins_at + 1)
            wait_until(lambda: not workload.count_rows("priority = 1 AND state <> 'delivered'"), 600, "the herd", 0.2)
            drained = time.time() - begins_at
        wait_until(workload.all_calls_ended, 120, "the calls")
        if count:
            _add_figures(bench, count, high, drained, probe.longest)
        return (_row_versions() - versions) / len(plans)


def _plan(number: int, node: Node, due_at: float) -> workload.Plan:
    return workload.Plan(number + 1, node, datetime.fromtimestamp(due_at, UTC))


def _add_figures(bench: Bench, count: int, high: Node, drained: float, longest: float) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT extract(epoch FROM a.started_at - t.planned_at)::float8 FROM scheduling_touch AS t"
            " CROSS JOIN LATERAL touch_attempts(t.attempts) AS a WHERE t.node_id = %s",
            [high.pk],
        )
        lateness = [row[0] for row in cursor.fetchall()]
    add, note = bench.figures.add, f"{HIGH_EACH_SECOND} high touches a second beside {count:,} normal ones"
    for share in (50, 99, 100):
        add(
            "herd", f"{count:,}: lateness of high touches: p{share}", percentile(lateness, share) * 1000, "ms",
            goal=GOAL_HIGH if share == 99 else None, note=note,
        )  # fmt: skip
    add("herd", f"{count:,}: delivered a second", count / drained, "/s")
    add("herd", f"{count:,}: longest time between two rescue passes", longest, "s", goal=GOAL_GAP)


class _PassProbe:
    """Read the time of the last rescue pass from the metric files. `longest` is the longest gap in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pass-probe")

    def __enter__(self) -> _PassProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        began_at = time.time()
        while not self._ended.wait(PROBE):
            last = max((sample.value for sample in _pass_samples()), default=began_at)
            self.longest = max(self.longest, time.time() - max(last, began_at))


def _pass_samples() -> list[Sample]:
    collector = MultiProcessCollector(CollectorRegistry(), path=str(settings.AFTERTOUCH_METRICS_DIR))  # type: ignore[no-untyped-call]
    return [
        sample
        for metric in collector.collect()
        for sample in metric.samples
        if sample.name == "aftertouch_pass_last_timestamp_seconds" and sample.labels["name"] == rescue.name
    ]


def _row_versions() -> int:
    """Return the inserted and updated touches so far, once the server has published its counts."""
    time.sleep(2)
    with connection.cursor() as cursor:
        cursor.execute("SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'scheduling_touch_live'")
        return int(cursor.fetchone()[0])


def _sleep_until(at: float) -> None:
    time.sleep(max(at - time.time(), 0))
