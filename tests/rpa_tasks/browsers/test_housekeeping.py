"""What the maintainer does with the database."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import OperationalError, connection, transaction
from django.utils.timezone import now
from pytest_django import DjangoAssertNumQueries, Settings

from rpa_tasks.browsers import registry
from rpa_tasks.maintainer import cleaning, housekeeping, main
from rpa_tasks.models import Evidence, ExecutionNode, Flow, Job, JobState, Platform, Run, Shop
from rpa_tasks.supervisor.runs import LEASE_NO, SHOP, STATE_DIR, TASK_ID
from tests.rpa_tasks.browsers.browser_processes import sleeping
from tests.support.waiting import eventually

pytestmark = pytest.mark.django_db


@pytest.fixture
def job() -> Job:
    platform = Platform.objects.create(key="pdd")
    shop = Shop.objects.create(platform=platform, shop_id="s1")
    flow = Flow.objects.create(platform=platform, task_type="sync_order", command=["true"])
    return Job.objects.create(
        task_id=uuid4(), shop=shop, flow=flow, due_at=now(), planned_at=now(), state=JobState.RUNNING, lease_no=3,
        lease_until=now() + timedelta(minutes=1),
    )  # fmt: skip


@pytest.fixture
def start_marked_process(state: Path) -> Iterator[Any]:
    """A process that some run left."""
    with ExitStack() as started:

        def begin(task_id: UUID, lease_no: int, folder: Path = state) -> subprocess.Popen[bytes]:
            marks = {TASK_ID: str(task_id), LEASE_NO: str(lease_no), SHOP: "pdd/s1", STATE_DIR: str(folder)}
            return started.enter_context(sleeping(env={**os.environ, **marks}))

        yield begin


def test_report_updates_node_row(state: Path, settings: Settings) -> None:
    settings.AFTERTOUCH_NODE = "node-7"
    settings.AFTERTOUCH_RPA_SLOTS = 4
    doing = housekeeping.Housekeeping(["high", "low"])
    doing.report()
    first = ExecutionNode.objects.get()
    doing.report()
    second = ExecutionNode.objects.get()

    assert (second.name, second.slots, second.queues) == ("node-7", 4, ["high", "low"])
    assert [browser["state"] for browser in second.browsers] == ["empty"] * 3
    assert second.seen_at > first.seen_at
    assert second.started_at == first.started_at


def test_report_uses_database_clock(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes compare it with theirs: a node whose clock is behind would lose its shops."""
    really = now
    monkeypatch.setattr(housekeeping, "now", lambda: really() - timedelta(days=1))
    doing = housekeeping.Housekeeping([])
    for _ in range(2):  # made, then changed
        doing.report()
        assert abs(ExecutionNode.objects.get().seen_at - really()) < timedelta(hours=1)


def test_delete_old_nodes_deletes_nodes_silent_for_a_month(state: Path, settings: Settings) -> None:
    """By those that live: machines that come and go have a name each."""
    settings.AFTERTOUCH_NODE = "here"
    for name, days in (("gone", 31), ("away", 29)):
        seen = now() - timedelta(days=days)
        ExecutionNode.objects.create(name=name, seen_at=seen, started_at=seen, slots=5)
    housekeeping.Housekeeping([]).report()
    cleaning.delete_old_nodes()
    assert {node.name for node in ExecutionNode.objects.all()} == {"here", "away"}


def test_end_orphans_ends_processes_of_ended_runs(
    start_marked_process: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = start_marked_process(job.task_id, 3)
    superseded = start_marked_process(job.task_id, 2)
    unknown = start_marked_process(uuid4(), 1)
    elsewhere = start_marked_process(uuid4(), 1, folder=Path("/another/node"))
    doing = housekeeping.Housekeeping([])

    doing.end_orphans()
    assert [each.poll() for each in (superseded, unknown)] == [None, None]  # their guard may still be at it

    monkeypatch.setattr(housekeeping, "ORPHANED_FOR", 0.0)
    doing.end_orphans()
    eventually(lambda: None not in (superseded.poll(), unknown.poll()), "they live on")
    assert (runs.poll(), elsewhere.poll()) == (None, None)

    Job.objects.filter(pk=job.pk).update(state=JobState.SUCCEEDED, lease_until=None, settled_at=now())
    doing.end_orphans()
    eventually(lambda: runs.poll() is not None, "it lives on")
    assert elsewhere.poll() is None


def test_end_orphans_keeps_run_whose_claim_appears(
    start_marked_process: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim was not visible yet; its thirty seconds start again when it ends."""
    process = start_marked_process(job.task_id, 4)
    doing = housekeeping.Housekeeping([])
    doing.end_orphans()
    Job.objects.filter(pk=job.pk).update(lease_no=4)
    doing.end_orphans()
    assert doing._orphaned_since == {}
    assert process.poll() is None


@pytest.fixture
def evidence(job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five pieces that are too old, and two that are not."""
    monkeypatch.setattr(cleaning, "BATCH", 2)
    settings.AFTERTOUCH_RPA_EVIDENCE_KEPT = timedelta(days=14)
    for days in (15, 15, 20, 16, 17, 13, 0):
        run = Run.objects.create(job=job, number=1, lease_no=1, started_at=now(), outcome="business")
        Evidence.objects.create(run=run, kind="log", content=b"x", created_at=now() - timedelta(days=days))


def test_old_evidence_is_deleted_in_batches(evidence: None, django_assert_num_queries: DjangoAssertNumQueries) -> None:
    with django_assert_num_queries(4):  # two, two, one, none
        assert cleaning.delete_old_evidence() == 5
    assert Evidence.objects.count() == 2
    assert Run.objects.count() == 7  # what happened stays known


@pytest.mark.django_db(transaction=True)
def test_delete_old_evidence_skips_locked_rows(evidence: None) -> None:
    oldest = Evidence.objects.order_by("created_at").values_list("pk", flat=True)[:1]

    def delete() -> int:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = '5s'")
            return cleaning.delete_old_evidence()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        assert list(Evidence.objects.select_for_update().filter(pk__in=list(oldest)))
        assert pool.submit(delete).result(60) == 4
    assert cleaning.delete_old_evidence() == 1


def write_old_log(name: str, days: float, content: bytes = b"said") -> Path:
    """A log without a write for that long."""
    path = registry.browser_logs_dir() / name
    path.write_bytes(content)
    then = time.time() - timedelta(days=days).total_seconds()
    os.utime(path, (then, then))
    return path


def test_old_logs_of_ended_runs_are_deleted_after_a_day(state: Path, job: Job) -> None:
    runs = write_old_log(f"{job.pk}-3.log", 2)  # silent for long, but still running
    superseded = write_old_log(f"{job.pk}-2.log", 2)
    unknown = write_old_log(f"{uuid4()}-1.log", 2)
    fresh = write_old_log(f"{uuid4()}-1.log", 0.9)
    nobodys = write_old_log("notes.log", 2)
    cleaning.delete_old_logs()
    assert [path.exists() for path in (runs, superseded, unknown, fresh, nobodys)] == [True, False, False, True, False]

    Job.objects.filter(pk=job.pk).update(state=JobState.SUCCEEDED, lease_until=None, settled_at=now())
    for step in cleaning.STEPS:
        step()
    assert not runs.exists()


def test_browser_logs_are_kept_as_long_as_evidence_and_cut(state: Path, settings: Settings) -> None:
    settings.AFTERTOUCH_RPA_EVIDENCE_KEPT = timedelta(days=14)
    old, quiet = write_old_log("browser-1.log", 15), write_old_log("browser-2.log", 13)
    chatty = write_old_log("browser-3.log", 0, b"x" * (cleaning.BROWSER_LOG + 1))
    cleaning.delete_old_logs()

    assert not old.exists()
    assert quiet.read_text() == "said"
    assert chatty.stat().st_size == 0


def test_is_database_available_without_database_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main.is_database_available()

    def away() -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr(connection, "ensure_connection", away)
    assert not main.is_database_available()
