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
from rpa_tasks.supervisor.markers import SWEEP_GRACE, marked
from rpa_tasks.supervisor.processes import Process, end, look

log = structlog.get_logger(__name__)

#: Command line of a supervisor process without the folder, because another release may run from another folder.
GUARD = (b"-I", b"-S", b"rpa_tasks/supervisor/main.py")
#: Attempts to climb from a process whose ancestors end during the climb. The next pass takes it after that.
CLIMBS = 10


def end_unguarded() -> int:
    """End unsupervised processes: SIGTERM, two seconds, SIGKILL. Returns how many processes of runs remain."""
    there = _of_runs()
    if doomed := [process for process in there if not has_guard(process)]:
        log.warning("unguarded_ended", pids=[process.pid for process in doomed])
        if left := end(_unguarded, SWEEP_GRACE):
            log.error("unguarded_left", pids=[process.pid for process in left])
        there = _of_runs()
    return len(there)


def has_guard(process: Process) -> bool:
    """Return whether an ancestor is a supervisor process. Also True if this is unknown or the process has ended."""
    for _ in range(CLIMBS):
        found = _climb(process)
        if found is not None:
            return found
    return True


def _climb(process: Process) -> bool | None:
    """Climb once. Returns None if an ancestor has just ended: the kernel has given its children to another parent by
    then.
    """
    below = look(process.pid)
    if below is None or below.started != process.started:
        return True
    while below.parent:
        above = look(below.parent)
        if above is None or above.gone or above.started > below.started:
            return None
        if is_guard(above.pid):
            return True
        below = above
    return False


def is_guard(pid: int) -> bool:
    """Return whether this process is a supervisor process, of this release or another."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return len(words) > 3 and tuple(words[1:3]) == GUARD[:2] and words[3].endswith(GUARD[2])


def _of_runs() -> list[Process]:
    found = {process.pid: process for process, _ in marked()}
    if uids := isolation.shop_uids():
        found |= {process.pid: process for process in isolation.left_by_runs(uids)}
    return list(found.values())


def _unguarded() -> list[Process]:
    return [process for process in _of_runs() if not has_guard(process)]
