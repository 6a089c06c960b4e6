"""Measure the throughput of calls that are all due at the same time."""

from __future__ import annotations

from benchmarks import comparison, measurements, sql_cost
from benchmarks.environment import Bench

GOAL = 20_000.0
TIMES_THE_ARTICLE = 6.0
TIMES_PLAIN_CELERY = 12.0
TOUCHES_EACH = 4  #: the cap is three


def burst(bench: Bench) -> None:
    count = bench.size(20_000, 4_000)
    offsets = [0.0] * count
    ended, waiting = bench.size(1_000_000, 20_000), bench.size(50_000, 2_000)
    add = bench.figures.add
    for repetition in range(bench.repeat):
        ours, article, plain = comparison.run_alternating(
            repetition,
            lambda: comparison.measure_aftertouch(bench, offsets, customers=count),
            lambda: comparison.measure_article(bench, offsets),
            lambda: comparison.measure_plain_celery(bench, offsets),
        )
        note = f"{count:,} due at the same instant"
        add("burst", "ours", ours.per_second, "/s", goal=GOAL, at_least=True, note=note)
        add("burst", "ours: lateness p50", ours.milliseconds(50), "ms")
        add("burst", "ours: lateness p99", ours.milliseconds(99), "ms")
        add("burst", "ours: early", ours.early, "calls", goal=0)
        add("burst", "ours: processor time each", ours.cpu_each, "µs", note="all programs together")
        for program in ours.cpu:
            add("burst", f"ours: processor time each: {program}", ours.cpu_of(program), "µs")
        add(
            "burst",
            "today's statements alone: PostgreSQL",
            sql_cost.measure_postgres(bench, count),
            "µs",
            note="its rows, by the server itself",
        )
        add(
            "burst",
            "today's statements alone: worker",
            sql_cost.measure_worker(count),
            "µs",
            note="its rows, read and written from Python",
        )
        add("burst", "the article's", article.per_second, "/s")
        add("burst", "the article's: processor time each", article.cpu_each, "µs")
        add("burst", "plain Celery", plain.per_second, "/s")
        add("burst", "plain Celery: processor time each", plain.cpu_each, "µs")
        add("burst", "processor time: ours / the article's", ours.cpu_each / article.cpu_each, "×")
        add("burst", "processor time: ours / plain Celery", ours.cpu_each / plain.cpu_each, "×")
        times = ours.per_second / article.per_second
        add("burst", "ours / the article's", times, "×", goal=TIMES_THE_ARTICLE, at_least=True)
        times = ours.per_second / plain.per_second
        add("burst", "ours / plain Celery", times, "×", goal=TIMES_PLAIN_CELERY, at_least=True)
        full = comparison.measure_aftertouch(
            bench, offsets, customers=count, ended=ended, waiting=waiting, analyze=False
        )
        add("burst", "ours, full tables", full.per_second, "/s", note=f"beside {ended:,} ended and {waiting:,} waiting")
        add("burst", "ours, full tables: processor time each", full.cpu_each, "µs", note="no ANALYZE of the benchmark")
        for other, reading, goal in (
            ("the article's", article, TIMES_THE_ARTICLE), ("plain Celery", plain, TIMES_PLAIN_CELERY)
        ):  # fmt: skip
            times = full.per_second / reading.per_second
            add("burst", f"ours, full tables / {other}", times, "×", goal=goal, at_least=True)
        capped = comparison.measure_aftertouch(bench, offsets, customers=count // TOUCHES_EACH, nodes=TOUCHES_EACH)
        note = f"{TOUCHES_EACH} for each customer, of which the cap lets 3 through"
        add("burst", "ours, capped", capped.per_second, "/s", note=note)
        sent = len(capped.lateness) / (count // TOUCHES_EACH)
        add("burst", "ours, capped: sent to each", sent, "touches")
        add("burst", "ours, capped: over the cap", measurements.customers_with_more_than(3), "customers", goal=0)
