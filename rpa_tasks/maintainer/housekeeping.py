"""Housekeeping of a node that needs PostgreSQL.

It reports the node, ends orphaned runs and lost take-overs, and deletes old evidence, logs, directories, profiles and
nodes. Each step is bounded, because the node must report between the passes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from uuid import UUID

import structlog
from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from django.db.models.functions import Now
from django.utils.timezone import now

from rpa_tasks import isolation
from rpa_tasks.browsers import registry, upkeep
from rpa_tasks.jobs.gates import is_draining
from rpa_tasks.maintainer.next_shops import find_next_shops
from rpa_tasks.maintainer.old_profiles import KEPT_FOR, OldProfiles
from rpa_tasks.models import ExecutionNode, Job, JobState
from rpa_tasks.supervisor.runs import LEASE_NO, TASK_ID, end_marked_processes, list_run_processes
from rpa_tasks.takeover import leases
from rpa_tasks.worker import node
from rpa_tasks.worker.node_name import claim_node_name
from scheduling import sql

log = structlog.get_logger(__name__)

ORPHANED_FOR = 30.0  #: seconds; the supervisor process, which ends a run more gently, has finished by then
BATCH = 200  #: evidence rows per pass: each may have a megabyte, and the node does not report during the deletion
TIDY_EVERY = 600.0  #: seconds
ENTRIES_AT_ONCE = 500  #: log files or directories read in one pass
RUN_LOG_KEPT = timedelta(days=1)  #: since its last write; the process that settles a run deletes its log
BROWSER_LOG = 1_000_000  #: bytes of a browser's standard error before the log is truncated

RunId = tuple[UUID, int]  #: task id and lease number


class Housekeeping:
    def __init__(self, queues: list[str], prewarmer: upkeep.Prewarmer | None = None) -> None:
        self.queues = queues
        self.prewarmer = prewarmer or upkeep.Prewarmer()
        self.started_at: datetime = now()
        self._orphaned_since: dict[RunId, float] = {}
        self._tidied_at: float | None = None
        self._runs = Walk(
            lambda: (run for shop in _scan_directory(registry.runs_dir()) for run in _scan_directory(Path(shop)))
        )
        self._left_runs: list[str] = []
        self._logs = Walk(lambda: _scan_directory(registry.browser_logs_dir()))
        self._old_profiles = OldProfiles()

    @property
    def steps(self) -> list[Callable[[], object]]:
        """List the steps of one pass in order."""
        return [
            self.report,
            self.choose_next_shops,
            self.end_orphans,
            leases.end_lost_take_overs,
            self.delete_left_runs,
            self.tidy,
            self.delete_old_logs,
            self._old_profiles.delete_one,
        ]

    def is_database_available(self) -> bool:
        """Return whether PostgreSQL is available."""
        try:
            close_old_connections()
            connection.ensure_connection()
        except (DatabaseError, InterfaceError) as error:
            log.warning("database_unavailable", error=str(error))
            return False
        return True

    def report(self) -> None:
        """Report this node with PostgreSQL's time, which the lanes use for comparison. A drain stays."""
        if not claim_node_name():
            log.error("node_name_taken", name=settings.AFTERTOUCH_NODE, remedy="give each node its own AFTERTOUCH_NODE")
            return
        ExecutionNode.objects.update_or_create(
            name=settings.AFTERTOUCH_NODE,
            defaults={
                "seen_at": Now(),
                "started_at": self.started_at,
                "slots": node.count_slots(),
                "queues": self._list_queues(),
                "browsers": upkeep.describe_slots(),
            },
        )

    def _list_queues(self) -> list[str]:
        """Return the queues of all workers of the node, because only one of their maintainers is active."""
        return list(dict.fromkeys([*self.queues, *node.served_queues()]))

    def choose_next_shops(self) -> None:
        self.prewarmer.wanted = [] if is_draining(settings.AFTERTOUCH_NODE) else find_next_shops(self._list_queues())

    def end_orphans(self) -> None:
        """End processes of finished runs whose supervisor process hangs.

        For killed supervisor processes see `rpa_tasks.supervisor.runs.end_unsupervised`.
        """
        found = {run for each in list_run_processes() if (run := _run_of_marks(each.markers))}
        orphans = found - _running_runs(found)
        at = time.monotonic()
        self._orphaned_since = {run: self._orphaned_since.get(run, at) for run in orphans}
        doomed = {run for run, since in self._orphaned_since.items() if at - since >= ORPHANED_FOR}
        if doomed:
            log.warning("orphans_ended", runs=[f"{task_id}/{lease_no}" for task_id, lease_no in doomed])
            end_marked_processes(lambda marks: _run_of_marks(marks) in doomed)

    def delete_left_runs(self) -> None:
        """Delete working directories, with parameter files, of runs whose worker was killed.

        Takes at most `isolation.DELETE_FOR`. The next pass continues.
        """
        ends_at = time.monotonic() + isolation.DELETE_FOR
        if not self._left_runs:
            entries = self._runs.next_entries()
            # A running job of any shop may have the directory: its profile may have changed since.
            leases = {int(entry.name) for entry in entries if re.fullmatch(r"[0-9]{1,9}", entry.name)}
            running = Job.objects.filter(state=JobState.RUNNING, lease_no__in=leases)
            kept = {str(lease_no) for lease_no in running.values_list("lease_no", flat=True)}
            self._left_runs = [entry.path for entry in entries if entry.name not in kept]
        while self._left_runs and (within := ends_at - time.monotonic()) > 0:
            isolation.delete_directory(Path(self._left_runs.pop()), within)

    def delete_old_logs(self) -> int:
        """Delete logs of finished runs, truncate or delete those of browsers. Returns the number of files read."""
        entries = self._logs.next_entries()
        old: dict[os.DirEntry[str], RunId | None] = {}
        for entry in entries:
            with suppress(OSError):
                age = timedelta(seconds=time.time() - entry.stat().st_mtime)
                if not entry.name.startswith("browser-"):
                    if age > RUN_LOG_KEPT:
                        task_id, _, lease_no = entry.name.removesuffix(".log").rpartition("-")
                        old[entry] = _run_of_marks({TASK_ID: task_id, LEASE_NO: lease_no})
                elif age > settings.AFTERTOUCH_RPA_EVIDENCE_KEPT:
                    os.unlink(entry)
                elif entry.stat().st_size > BROWSER_LOG:
                    os.truncate(entry, 0)
        # Age is not enough: a run may print nothing for days.
        running = _running_runs({run for run in old.values() if run})
        for entry, run in old.items():
            if run not in running:
                with suppress(OSError):
                    os.unlink(entry)
        return len(entries)

    def tidy(self) -> None:
        if self._tidied_at is not None and time.monotonic() - self._tidied_at < TIDY_EVERY:
            return
        if delete_old_evidence() < BATCH:  # otherwise the next pass deletes more
            delete_old_nodes()
            self._tidied_at = time.monotonic()


def delete_old_nodes() -> None:
    """Delete nodes without a recent report. A node that comes back reports itself again.

    A draining node stays: otherwise it would take jobs when it comes back.
    """
    ExecutionNode.objects.filter(seen_at__lt=Now() - KEPT_FOR, draining_at=None).delete()


def delete_old_evidence() -> int:
    """Delete one batch of old evidence and return its size. Rows that another node is deleting are skipped."""
    return sql.execute(
        """
        DELETE FROM rpa_tasks_evidence WHERE id = ANY(ARRAY(
            SELECT id FROM rpa_tasks_evidence WHERE created_at < statement_timestamp() - %(kept)s
            ORDER BY created_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED
        ))
        """,
        {"kept": settings.AFTERTOUCH_RPA_EVIDENCE_KEPT, "batch": BATCH},
    )


class Walk:
    """Read the entries of folders in bounded steps, again and again: killed workers may leave very many."""

    def __init__(self, scan: Callable[[], Iterator[os.DirEntry[str]]]) -> None:
        self._scan = scan
        self._rest = scan()

    def next_entries(self) -> list[os.DirEntry[str]]:
        entries = list(islice(self._rest, ENTRIES_AT_ONCE))
        if len(entries) < ENTRIES_AT_ONCE:
            self._rest = self._scan()
        return entries


def _scan_directory(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from entries


def _run_of_marks(marks: Mapping[str, str]) -> RunId | None:
    try:
        return UUID(marks[TASK_ID]), int(marks[LEASE_NO])
    except (KeyError, ValueError):
        return None


def _running_runs(runs: set[RunId]) -> set[RunId]:
    jobs = Job.objects.filter(state=JobState.RUNNING, task_id__in={task_id for task_id, _ in runs})
    return set(jobs.values_list("task_id", "lease_no")) if runs else set()
