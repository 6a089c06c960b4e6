"""End processes of runs whose supervisor process was killed.

The kernel kills the command with its supervisor process, but not the command's descendants. If the runner was killed
too, no other process knows them. A supervisor process adopts its orphaned descendants, so it is an ancestor of the
whole run as long as it lives. Only the kernel is asked: another node may serve the shop as soon as the lease expires,
even if this node cannot reach PostgreSQL.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from rpa_tasks import isolation
from rpa_tasks.supervisor.markers import SWEEP_GRACE, marked_processes
from rpa_tasks.supervisor.processes import Process, end_processes, read_process

log = structlog.get_logger(__name__)

#: Command line of a supervisor process without the folder, because another release may run from another folder.
SUPERVISOR_COMMAND = (b"-I", b"-S", b"rpa_tasks/supervisor/main.py")
#: Attempts to climb from a process whose ancestors end during the climb. The next pass takes it after that.
MAX_SEARCHES = 10


def end_unsupervised() -> int:
    """End unsupervised processes: SIGTERM, two seconds, SIGKILL. Returns how many processes of runs remain."""
    there = _run_processes()
    if doomed := [process for process in there if not has_supervisor(process)]:
        log.warning("unguarded_ended", pids=[process.pid for process in doomed])
        if left := end_processes(_unsupervised, SWEEP_GRACE):
            log.error("unguarded_left", pids=[process.pid for process in left])
        there = _run_processes()
    return len(there)


def has_supervisor(process: Process) -> bool:
    """Return whether an ancestor is a supervisor process. Also True if this is unknown or the process has ended."""
    for _ in range(MAX_SEARCHES):
        found = _search_ancestors(process)
        if found is not None:
            return found
    return True


def _search_ancestors(process: Process) -> bool | None:
    """Climb once. Returns None if an ancestor has just ended: the kernel has given its children to another parent by
    then.
    """
    below = read_process(process.pid)
    if below is None or below.started != process.started:
        return True
    while below.parent:
        above = read_process(below.parent)
        if above is None or above.gone or above.started > below.started:
            return None
        if is_supervisor(above.pid):
            return True
        below = above
    return False


def is_supervisor(pid: int) -> bool:
    """Return whether this process is a supervisor process, of this release or another."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return len(words) > 3 and tuple(words[1:3]) == SUPERVISOR_COMMAND[:2] and words[3].endswith(SUPERVISOR_COMMAND[2])


def _run_processes() -> list[Process]:
    found = {process.pid: process for process, _ in marked_processes()}
    if uids := isolation.shop_uids():
        found |= {process.pid: process for process in isolation.leftover_run_processes(uids)}
    return list(found.values())


def _unsupervised() -> list[Process]:
    return [process for process in _run_processes() if not has_supervisor(process)]
