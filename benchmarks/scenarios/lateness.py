"""Measure the lateness of calls that fall due evenly over ten seconds. No call may be early."""

from __future__ import annotations

from benchmarks import comparison
from benchmarks.environment import Bench
from benchmarks.measurements import Reading

GOAL_P99 = 30.0


def lateness(bench: Bench) -> None:
    count, seconds = bench.size(10_000, 2_000), bench.size(10, 2)
    offsets = [number * seconds / count for number in range(count)]
    for repetition in range(bench.repeat):
        note = f"{count / seconds:,.0f} a second for {seconds} s"
        ours, article, plain = comparison.run_alternating(
            repetition,
            lambda: comparison.measure_aftertouch(bench, offsets, customers=count),
            lambda: comparison.measure_article(bench, offsets),
            lambda: comparison.measure_plain_celery(bench, offsets),
        )
        _add(bench, "ours", ours, GOAL_P99, note)
        _add(bench, "the article's", article)
        _add(bench, "plain Celery", plain)


def _add(bench: Bench, who: str, reading: Reading, goal: float | None = None, note: str = "") -> None:
    add = bench.figures.add
    add("lateness", f"{who}: p50", reading.milliseconds(50), "ms")
    add("lateness", f"{who}: p99", reading.milliseconds(99), "ms", goal=goal, note=note)
    add("lateness", f"{who}: max", reading.milliseconds(100), "ms")
    add("lateness", f"{who}: processor time each", reading.cpu_each, "µs")
    add("lateness", f"{who}: early", reading.early, "calls", goal=0 if goal else None)
