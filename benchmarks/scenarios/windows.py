"""Measure batches of jobs that are refused by a window or merged into a waiting job, from four processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta

from benchmarks.environment import Bench, processor_seconds
from benchmarks.window_load import BATCH, FLOWS, SHOPS
from config.environment import ROOT

PROCESSES = 4
GOAL = 10_000.0


def windows(bench: Bench) -> None:
    for _ in range(bench.repeat):
        _store_jobs()
        _measure_batches(bench, bench.size(40, 4))


def _store_jobs() -> None:
    """Store a job of each shop and flow: ended ones with a window, and ones that wait for a day."""
    from django.db import connection
    from django.utils.timezone import now

    from rpa_tasks.jobs.publish import PublishRequest, publish_many
    from rpa_tasks.models import DedupeWindow, Flow, Job, Lane, Platform, Run, Shop

    for model in (Run, DedupeWindow, Job, Lane, Shop, Flow):
        model._default_manager.all().delete()
    platform, _ = Platform.objects.update_or_create(key="bench", defaults={"backlog_limit": 100_000})
    for task_type, window in zip(FLOWS, (timedelta(days=1), None), strict=True):
        Flow.objects.create(
            platform=platform, task_type=task_type, command=["true", "{param}"], dedupe_by="task_type",
            dedupe_window=window,
        )  # fmt: skip
    shops = Shop.objects.bulk_create([Shop(platform=platform, shop_id=f"s{number}") for number in range(SHOPS)])
    Lane.objects.bulk_create([Lane(shop=shop) for shop in shops])
    for task_type in FLOWS:
        for first in range(0, SHOPS, BATCH):
            names = [f"s{number}" for number in range(first, first + BATCH)]
            publish_many([PublishRequest("bench", name, task_type, delay=timedelta(days=1)) for name in names])
    Job.objects.filter(flow__task_type=FLOWS[0]).update(state="succeeded", settled_at=now(), fresh=False)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE rpa_tasks_job, rpa_tasks_dedupewindow, rpa_tasks_shop")


def _measure_batches(bench: Bench, batches: int) -> None:
    from rpa_tasks.models import Job

    loads = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.window_load", str(number), str(batches)],
            cwd=ROOT, env=bench.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(PROCESSES)
    ]  # fmt: skip
    for load in loads:
        assert load.stdout is not None
        assert load.stdout.readline() == "ready\n"
    database = processor_seconds([bench.servers["PostgreSQL"]])
    began_at = time.perf_counter()
    counts: Counter[str] = Counter()
    for load in loads:
        assert load.stdin is not None
        load.stdin.write("go\n")
        load.stdin.flush()
    own = 0.0
    for load in loads:
        answer = json.loads(load.communicate()[0])
        counts.update(answer["counts"])
        own += answer["seconds"]
    seconds = time.perf_counter() - began_at
    total = PROCESSES * batches * BATCH
    add = bench.figures.add
    note = f"{PROCESSES} processes, {BATCH} a batch, {SHOPS:,} shops"
    add("windows", "refused or merged", total / seconds, "/s", goal=GOAL, at_least=True, note=note)
    add("windows", "processor time of PostgreSQL for each",
        (processor_seconds([bench.servers["PostgreSQL"]]) - database) / total * 1e6, "µs")  # fmt: skip
    add("windows", "processor time of the publisher for each", own / total * 1e6, "µs")
    right = counts["window"] + counts["waiting"]
    add("windows", "wrong answers", total - right, "requests", goal=0)
    merged = sum(Job.objects.filter(flow__task_type=FLOWS[1]).values_list("requests", flat=True)) - SHOPS
    add("windows", "merges lost or doubled", abs(counts["waiting"] - merged), "requests", goal=0)
    add("windows", "jobs beyond one a window", Job.objects.count() - 2 * SHOPS, "jobs", goal=0)
