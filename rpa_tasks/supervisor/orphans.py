"""End processes of runs whose supervisor process was killed.

The kernel kills the command with its supervisor process, but not the command's descendants. If the runner was killed
too, no other process knows them. A supervisor process adopts its orphaned descendants, so it is an ancestor of the
whole run as long as it lives. Only the kernel is asked: another node may serve the shop as soon as the lease expires,
even if this node cannot reach PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from rpa_tasks.supervisor.ancestry import Known, has_supervisor
from rpa_tasks.supervisor.markers import SWEEP_GRACE, marked_processes
from rpa_tasks.supervisor.processes import Process, end_processes

log = structlog.get_logger(__name__)


def end_unsupervised() -> int:
    """End unsupervised processes: SIGTERM, two seconds, SIGKILL. Returns how many processes of runs remain."""
    there = _list_run_processes()
    if doomed := _unsupervised(there):
        log.warning("orphaned_processes_ended", pids=[process.pid for process in doomed])
        if left := end_processes(lambda: _unsupervised(_list_run_processes()), SWEEP_GRACE):
            log.error("orphaned_processes_left", pids=[process.pid for process in left])
        there = _list_run_processes()
    return len(there)


def _list_run_processes() -> list[Process]:
    return [process for process, _ in marked_processes()]


def _unsupervised(there: Iterable[Process]) -> list[Process]:
    known: Known = {}
    return [process for process in there if not has_supervisor(process, known)]
