"""What the maintainer does with the database: tell what the node looks like, end runs that are over, drop
what is old."""

from __future__ import annotations

import os
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
from rpa_tasks.browsers import recycling, registry
from rpa_tasks.browsers.profiles import KEPT_FOR, OldProfiles
from rpa_tasks.models import ExecutionNode, Job, JobState
from rpa_tasks.supervisor.markers import LEASE_NO, TASK_ID, marked, sweep
from rpa_tasks.worker import node
from scheduling import sql

log = structlog.get_logger(__name__)

ORPHANED_FOR = 30.0  #: seconds; the guard's own ladder, which is gentler, is over by then
BATCH = 200  #: pieces of evidence a pass: each may have a megabyte, and the node says nothing meanwhile
TIDY_EVERY = 600.0  #: seconds
LOGS_AT_ONCE = 500  #: log files or directories a pass looks at, however many there are
RUN_LOG_KEPT = timedelta(days=1)  #: since it was last written to; whoever settles a run deletes its log
BROWSER_LOG = 1_000_000  #: bytes that a browser may say on standard error before it is cut

Run = tuple[UUID, int]  #: task and lease number


class Chores:
    def __init__(self, queues: list[str]) -> None:
        self.queues = queues
        self.started_at: datetime = now()
        self._orphaned_since: dict[Run, float] = {}
        self._tidied_at: float | None = None
        self._left_runs = LeftRuns()
        self._old_logs = OldLogs()
        self._old_profiles = OldProfiles()

    @property
    def steps(self) -> list[Callable[[], object]]:
        """One pass, in this order."""
        return [
            self.report,
            self.end_orphans,
            self._left_runs.delete_some,
            self.tidy,
            self._old_logs.delete_some,
            self._old_profiles.delete_one,
        ]

    def can_be_done(self) -> bool:
        """Whether the database answers."""
        try:
            close_old_connections()
            connection.ensure_connection()
        except (DatabaseError, InterfaceError) as error:
            log.warning("database_away", error=str(error))
            return False
        return True

    def report(self) -> None:
        """What the back office knows of this node. By the database's clock, with which the lanes compare it."""
        ExecutionNode.objects.update_or_create(
            name=settings.AFTERTOUCH_NODE,
            defaults={
                "seen_at": Now(),
                "started_at": self.started_at,
                "slots": node.slots(),
                # Of all its workers: only one of their maintainers works.
                "queues": list(dict.fromkeys([*self.queues, *node.carried()])),
                "browsers": recycling.describe(),
            },
        )

    def end_orphans(self) -> None:
        """End processes of runs that are over and whose guard does not end them: it hangs. Where it was killed, see
        `rpa_tasks.supervisor.orphans`."""
        found = _marked_runs()
        orphans = found - _running(found)
        at = time.monotonic()
        self._orphaned_since = {run: self._orphaned_since.get(run, at) for run in orphans}
        doomed = {run for run, since in self._orphaned_since.items() if at - since >= ORPHANED_FOR}
        if doomed:
            log.warning("orphans_ended", runs=[f"{task_id}/{lease_no}" for task_id, lease_no in doomed])
            sweep(lambda marks: _run_of(marks) in doomed)

    def tidy(self) -> None:
        if self._tidied_at is not None and time.monotonic() - self._tidied_at < TIDY_EVERY:
            return
        if delete_old_evidence() < BATCH:  # else there is more, for the next pass
            forget_old_nodes()
            self._tidied_at = time.monotonic()


def forget_old_nodes() -> None:
    """Nodes that came for a while and went. Their shops live elsewhere long since; should one come back, it says so."""
    ExecutionNode.objects.filter(seen_at__lt=Now() - KEPT_FOR).delete()


def delete_old_evidence() -> int:
    """A batch, and none that another node is just deleting. Returns how many."""
    return sql.count(
        """
        DELETE FROM rpa_tasks_evidence WHERE id = ANY(ARRAY(
            SELECT id FROM rpa_tasks_evidence WHERE created_at < statement_timestamp() - %(kept)s
            ORDER BY created_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED
        ))
        """,
        {"kept": settings.AFTERTOUCH_RPA_EVIDENCE_KEPT, "batch": BATCH},
    )


class LeftRuns:
    """A walk through the working directories, with the parameter files, of runs whose worker was killed."""

    def __init__(self) -> None:
        self._walk = _entries(registry.runs())
        self._left: list[str] = []

    def delete_some(self) -> None:
        """Delete for `isolation.DELETE_FOR` at most. What takes longer goes on when its turn comes again."""
        ends_at = time.monotonic() + isolation.DELETE_FOR
        if not self._left:
            entries = list(islice(self._walk, LOGS_AT_ONCE))
            if len(entries) < LOGS_AT_ONCE:
                self._walk = _entries(registry.runs())  # from the beginning, next time
            self._left = [entry.name for entry in _of_runs_that_are_over(entries)]
        while self._left and (within := ends_at - time.monotonic()) > 0:
            isolation.delete_directory(registry.runs() / self._left.pop(), within)


class OldLogs:
    """A walk through the folder of logs, a few steps a pass: what killed workers left may be very many files."""

    def __init__(self) -> None:
        self._walk = _entries(registry.logs())

    def delete_some(self) -> int:
        """Delete runs' logs that nobody will; cut the browsers' where they grow. Returns how many were looked at."""
        entries = list(islice(self._walk, LOGS_AT_ONCE))
        if len(entries) < LOGS_AT_ONCE:
            self._walk = _entries(registry.logs())  # from the beginning, next time
        left: list[os.DirEntry[str]] = []
        for entry in entries:
            with suppress(OSError):
                if entry.name.startswith("browser-"):
                    _limit(entry)
                elif _silent_for(entry) > RUN_LOG_KEPT:
                    left.append(entry)
        for entry in _of_runs_that_are_over(left):
            with suppress(OSError):
                os.unlink(entry)
        return len(entries)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from entries


def _limit(entry: os.DirEntry[str]) -> None:
    """A browser's log."""
    if _silent_for(entry) > settings.AFTERTOUCH_RPA_EVIDENCE_KEPT:
        os.unlink(entry)
    elif entry.stat().st_size > BROWSER_LOG:
        os.truncate(entry, 0)


def _silent_for(entry: os.DirEntry[str]) -> timedelta:
    return timedelta(seconds=time.time() - entry.stat().st_mtime)


def _of_runs_that_are_over(entries: list[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    """A run may go on for days and say nothing."""
    runs = {entry: _run_of_entry(entry.name) for entry in entries}
    running = _running({run for run in runs.values() if run})
    return [entry for entry, run in runs.items() if run not in running]


def _run_of_entry(name: str) -> Run | None:
    """By its name: `<task>-<lease number>` of its working directory, with `.log` of its log."""
    task_id, _, lease_no = name.removesuffix(".log").rpartition("-")
    return _run_of({TASK_ID: task_id, LEASE_NO: lease_no})


def _marked_runs() -> set[Run]:
    """The runs that have processes on this node."""
    return {run for _, marks in marked() if (run := _run_of(marks))}


def _run_of(marks: Mapping[str, str]) -> Run | None:
    try:
        return UUID(marks[TASK_ID]), int(marks[LEASE_NO])
    except (KeyError, ValueError):
        return None


def _running(runs: set[Run]) -> set[Run]:
    jobs = Job.objects.filter(state=JobState.RUNNING, task_id__in={task_id for task_id, _ in runs})
    return set(jobs.values_list("task_id", "lease_no")) if runs else set()
