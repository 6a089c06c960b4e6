"""Measure the time from publishing a job to the start of its command, and the wait for a warm browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import psutil

from benchmarks.environment import Bench, resident_mb, wait_until
from benchmarks.results import percentile

EXECUTION = (
    "celery", "-A", "config", "worker", "-Q", "high,normal,low", "-c", "5", "-n", "execution@%h",
    "--without-gossip", "--without-mingle",
)  # fmt: skip
RATE = 20
GOAL_START, GOAL_WARM = 150.0, 50.0
SHOPS = 40


def rpa(bench: Bench) -> None:
    _create_shops()
    with _run_execution_node(bench) as worker:
        for number in range(bench.repeat):
            _measure_starts(bench, bench.size(400, 60), number)
        _measure_browsers(bench, worker, bench.size(200, 20))


@contextmanager
def _run_execution_node(bench: Bench) -> Iterator[psutil.Process]:
    import config.celery.application  # noqa: F401  (wake-ups go to the broker)

    with bench.core(), bench.running(*EXECUTION) as worker:
        wait_until(lambda: len(worker.children()) >= 5, 60, "the execution worker")
        yield worker


def _create_shops() -> None:
    from rpa_tasks.models import Flow, Platform, Shop

    platform, _ = Platform.objects.get_or_create(key="rpa")
    for shop in range(SHOPS):
        Shop.objects.get_or_create(platform=platform, shop_id=f"s{shop}")
    # The output is stored with the run: the time at which the command started.
    command = ["/bin/sh", "-c", "date +%s.%N", "{param}"]
    for task_type, browses in (("look", False), ("browse", True)):
        Flow.objects.update_or_create(
            platform=platform, task_type=task_type,
            defaults={"command": command, "idempotent": True, "needs_browser": browses},
        )  # fmt: skip


def _measure_starts(bench: Bench, count: int, number: int) -> None:
    from rpa_tasks.jobs.publish import PublishRequest, publish_job
    from rpa_tasks.models import Job

    _delete_jobs()
    began_at = time.monotonic()
    for job in range(count):
        time.sleep(max(0.0, began_at + job / RATE - time.monotonic()))
        publish_job(PublishRequest("rpa", f"s{job % SHOPS}", "look", dedupe_key=f"{number}-{job}"))
    wait_until(lambda: not Job.objects.exclude(state="succeeded").exists(), 60, "the jobs")
    took = [(began - due.timestamp()) * 1000 for due, began in _start_delays()]
    assert len(took) == count
    for share in (50, 99):
        bench.figures.add(
            "rpa", f"published → command runs: p{share}", percentile(took, share), "ms",
            goal=GOAL_START if share == 99 else None, note=f"{RATE} jobs/s, {SHOPS} shops, 5 slots",
        )  # fmt: skip


def _delete_jobs() -> None:
    """Delete all jobs after the last run has ended. A run that ends later would reference a deleted job."""
    from rpa_tasks.models import Job

    Job.objects.filter(state__in=("scheduled", "queued")).update(state="cancelled", lease_until=None)
    wait_until(lambda: not Job.objects.filter(state="running").exists(), 120, "the runs of before")
    Job.objects.all().delete()


def _start_delays() -> list[tuple[datetime, float]]:
    from rpa_tasks.models import Run

    runs = Run.objects.values_list("job__due_at", "detail")
    return [(due, float(detail.split()[0])) for due, detail in runs]


def _measure_browsers(bench: Bench, worker: psutil.Process, count: int) -> None:
    """Run browser jobs in sequence over four shops whose browsers stay warm."""
    from rpa_tasks.jobs.publish import PublishRequest, publish_job
    from rpa_tasks.models import Job, Run

    _delete_jobs()
    memory = []
    for job in range(count):
        receipt = publish_job(PublishRequest("rpa", f"s{job % 4}", "browse", dedupe_key=str(job)))
        wait_until(
            lambda task_id=receipt.task_id: Job.objects.filter(pk=task_id, state="succeeded").exists(),
            60, "a browser job", pause=0.02,
        )  # fmt: skip
        memory.append(resident_mb([worker]))
    waits = [wait.total_seconds() * 1000 for wait in Run.objects.order_by("id").values_list("pool_wait", flat=True)]
    add = bench.figures.add
    add("rpa", "a cold browser: median", percentile(waits[:4], 50), "ms", note="the first of each of four shops")
    for share in (50, 99):
        add(
            "rpa", f"a warm browser: p{share}", percentile(waits[4:], share), "ms",
            goal=GOAL_WARM if share == 99 else None, note=f"{count} jobs in a row over four shops",
        )  # fmt: skip
    tenth = max(1, count // 10)
    add("rpa", "node's memory at first", percentile(memory[tenth : 2 * tenth], 50), "MB")
    add("rpa", "node's memory at last", percentile(memory[-tenth:], 50), "MB", note="without the browsers")
