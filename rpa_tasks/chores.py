"""What the maintainer does with the database: tell what the node looks like, end runs that are over, drop
what is old."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from uuid import UUID

import structlog
from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections, connection
from django.utils.timezone import now

from rpa_tasks.markers import LEASE_NO, TASK_ID, sweep
from rpa_tasks.models import Evidence, ExecutionNode, Job, JobState
from rpa_tasks.pool import places, view

log = structlog.get_logger(__name__)

ORPHANED_FOR = 30.0  #: seconds; the guard's own ladder, which is gentler, is over by then
BATCH = 200  #: pieces of evidence a statement: each may have a megabyte
TIDY_EVERY = 600.0  #: seconds
BROWSER_LOG = 1_000_000  #: bytes that a browser may say on standard error before it is cut

Run = tuple[UUID, int]  #: task and lease number


class Chores:
    def __init__(self, queues: list[str]) -> None:
        self.queues = queues
        self.started_at: datetime = now()
        self._orphaned_since: dict[Run, float] = {}
        self._tidied_at: float | None = None

    @property
    def steps(self) -> list[Callable[[], object]]:
        """One pass, in this order."""
        return [self.report, self.end_orphans, self.tidy]

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
        """What the back office knows of this node."""
        ExecutionNode.objects.update_or_create(
            name=settings.AFTERTOUCH_NODE,
            defaults={
                "seen_at": now(),
                "started_at": self.started_at,
                "slots": settings.AFTERTOUCH_RPA_SLOTS,
                "queues": self.queues,
                "browsers": view.describe(),
            },
        )

    def end_orphans(self) -> None:
        """End processes of runs that are over: their worker and their guard were killed, so nobody else will."""
        found = _marked_runs()
        orphans = found - _running(found)
        at = time.monotonic()
        self._orphaned_since = {run: self._orphaned_since.get(run, at) for run in orphans}
        doomed = {run for run, since in self._orphaned_since.items() if at - since >= ORPHANED_FOR}
        if doomed:
            log.warning("orphans_ended", runs=[f"{task_id}/{lease_no}" for task_id, lease_no in doomed])
            sweep(lambda marks: _run_of(marks) in doomed)

    def tidy(self) -> None:
        if self._tidied_at is None or time.monotonic() - self._tidied_at >= TIDY_EVERY:
            delete_old_evidence()
            delete_old_logs()
            self._tidied_at = time.monotonic()


def delete_old_evidence() -> int:
    """A batch a statement, so that a node's backlog of a month locks nothing for long. Returns how many."""
    deleted = 0
    old = Evidence.objects.filter(created_at__lt=now() - settings.AFTERTOUCH_RPA_EVIDENCE_KEPT)
    while batch := list(old.order_by("created_at").values_list("pk", flat=True)[:BATCH]):
        deleted += Evidence.objects.filter(pk__in=batch).delete()[0]
    return deleted


def delete_old_logs() -> None:
    """Those of runs, after the same time as their evidence. Those of browsers are cut where they grow."""
    oldest = time.time() - settings.AFTERTOUCH_RPA_EVIDENCE_KEPT.total_seconds()
    for path, size, changed_at in _log_files():
        with suppress(OSError):
            if changed_at < oldest:
                path.unlink()
            elif path.name.startswith("browser-") and size > BROWSER_LOG:
                path.open("wb").close()


def _log_files() -> Iterator[tuple[Path, int, float]]:
    for path in places.logs().iterdir():
        with suppress(OSError):
            stat = path.stat()
            yield path, stat.st_size, stat.st_mtime


def _marked_runs() -> set[Run]:
    """The runs that have processes on this node."""
    found: set[Run] = set()

    def note(marks: Mapping[str, str]) -> bool:
        if run := _run_of(marks):
            found.add(run)
        return False

    sweep(note)
    return found


def _run_of(marks: Mapping[str, str]) -> Run | None:
    try:
        return UUID(marks[TASK_ID]), int(marks[LEASE_NO])
    except (KeyError, ValueError):
        return None


def _running(runs: set[Run]) -> set[Run]:
    jobs = Job.objects.filter(state=JobState.RUNNING, task_id__in={task_id for task_id, _ in runs})
    return set(jobs.values_list("task_id", "lease_no")) if runs else set()
