"""Measure calls that are all due at the same time: their rate and their processor time."""

from __future__ import annotations

from benchmarks import comparison, measurements
from benchmarks.environment import Bench

GOAL_COST = 260.0  #: microseconds of processor time
TIMES = {"the article's": 4.0, "plain Celery": 6.0, "Dramatiq": None}  #: goals of the rate ÷ that of each peer
TOUCHES_EACH = 4  #: the cap is three


def burst(bench: Bench) -> None:
    count = bench.size(20_000, 4_000)
    offsets = [0.0] * count
    ended, waiting = bench.size(1_000_000, 20_000), bench.size(50_000, 2_000)
    add = bench.figures.add
    for repetition in range(bench.repeat):
        readings = comparison.measure_contestants(bench, repetition, offsets)
        ours = readings["ours"]
        for name, reading in readings.items():
            add("burst", name, reading.per_second, "/s", note=f"{count:,} due at the same instant")
            comparison.add_calls(bench, "burst", name, reading)
            goal = GOAL_COST if name == "ours" else None
            add(
                "burst", f"{name}: processor time each", reading.cpu_each, "µs", goal=goal, note="all programs together"
            )
            for program in reading.cpu:
                add("burst", f"{name}: processor time each: {program}", reading.cpu_of(program), "µs")
        for peer, goal in TIMES.items():
            ratio = ours.cpu_each / readings[peer].cpu_each
            add("burst", f"processor time: ours / {peer}", ratio, "×")
            times = ours.per_second / readings[peer].per_second
            add("burst", f"ours / {peer}", times, "×", goal=goal, at_least=True)
        full = comparison.measure_aftertouch(
            bench, offsets, customers=count, ended=ended, waiting=waiting, analyze=False
        )
        add("burst", "ours, full tables", full.per_second, "/s", note=f"beside {ended:,} ended and {waiting:,} waiting")
        add("burst", "ours, full tables: processor time each", full.cpu_each, "µs", note="no ANALYZE of the benchmark")
        for peer, goal in TIMES.items():
            times = full.per_second / readings[peer].per_second
            add("burst", f"ours, full tables / {peer}", times, "×", goal=goal, at_least=True)
        capped = comparison.measure_aftertouch(bench, offsets, customers=count // TOUCHES_EACH, nodes=TOUCHES_EACH)
        note = f"{TOUCHES_EACH} for each customer, of which the cap lets 3 through"
        add("burst", "ours, capped", capped.per_second, "/s", note=note)
        sent = len(capped.lateness) / (count // TOUCHES_EACH)
        add("burst", "ours, capped: sent to each", sent, "touches")
        add("burst", "ours, capped: missing, or twice", capped.missing + capped.repeated, "calls", goal=0)
        add("burst", "ours, capped: over the cap", measurements.customers_with_more_than(3), "customers", goal=0)
