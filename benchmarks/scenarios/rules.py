"""Measure what conditions, windows and variants on every node cost in `burst`."""

from __future__ import annotations

from benchmarks import comparison, workload
from benchmarks.environment import Bench

GOAL = 1.15


def rules(bench: Bench) -> None:
    count = bench.size(20_000, 4_000)
    offsets = [0.0] * count
    add = bench.figures.add
    contestants = {
        "without rules": None,
        "event and level": workload.EVENT_AND_LEVEL,
        "profile and earlier events": workload.PROFILE_AND_EVENTS,
    }
    for repetition in range(bench.repeat):
        plain, *ruled = comparison.run_alternating(
            repetition,
            *(
                lambda conditions=conditions: comparison.measure_aftertouch(  # type: ignore[misc]
                    bench, offsets, customers=count, conditions=conditions
                )
                for conditions in contestants.values()
            ),
        )
        for name, found in zip(contestants, (plain, *ruled), strict=True):
            add("rules", f"{name}: processor time each", found.cpu_each, "µs", note=f"{len(found.lateness):,} sent")
            add("rules", f"{name}: rate", found.per_second, "/s")
        for name, found in zip([*contestants][1:], ruled, strict=True):
            for program in found.cpu:
                add("rules", f"{name}: processor time each: {program}", found.cpu_of(program), "µs")
            # Counting earlier events and reading profiles is work of its own, so it has no goal.
            goal = GOAL if name == "event and level" else None
            add("rules", f"processor time: {name} / without", found.cpu_each / plain.cpu_each, "×", goal=goal)
