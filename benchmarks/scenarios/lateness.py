"""Measure the lateness of calls that fall due evenly over ten seconds. No call may be early."""

from __future__ import annotations

from benchmarks import comparison
from benchmarks.environment import Bench

GOAL_P99 = 30.0


def lateness(bench: Bench) -> None:
    count, seconds = bench.size(10_000, 2_000), bench.size(10, 2)
    offsets = [number * seconds / count for number in range(count)]
    for repetition in range(bench.repeat):
        for name, reading in comparison.measure_contestants(bench, repetition, offsets).items():
            comparison.add_calls(bench, "lateness", name, reading, goal_p99=GOAL_P99 if name == "ours" else None)
            bench.figures.add("lateness", f"{name}: processor time each", reading.cpu_each, "µs")
