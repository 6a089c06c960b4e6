"""Ends what is left of a run whose guard was killed. The kernel kills the command with its guard, but not what the
command has started; and where the runner was killed as well, nobody else knows of it.

A guard adopts the orphans among its descendants, so whatever belongs to a run has its guard above it as long as that
lives. That is told by the kernel alone: the shop may be another node's as soon as the lease is over, whether or not
this node can ask the database.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from rpa_tasks import isolation
from rpa_tasks.supervisor.markers import SWEEP_GRACE, marked
from rpa_tasks.supervisor.processes import Process, end, look

log = structlog.get_logger(__name__)

#: How a guard was started, but for the folder: another release may run from another one.
GUARD = (b"-I", b"-S", b"rpa_tasks/supervisor/main.py")
#: Climbs from a process whose ancestors end meanwhile, before it is left to the next pass.
CLIMBS = 10


def end_unguarded() -> int:
    """SIGTERM, two seconds, SIGKILL. Returns how many processes of runs are still there: those whose guard lives."""
    there = _of_runs()
    if doomed := [process for process in there if not has_guard(process)]:
        log.warning("unguarded_ended", pids=[process.pid for process in doomed])
        if left := end(_unguarded, SWEEP_GRACE):
            log.error("unguarded_left", pids=[process.pid for process in left])
        there = _of_runs()
    return len(there)


def has_guard(process: Process) -> bool:
    """Whether some ancestor guards it. True as well where that cannot be told, or it has just ended."""
    for _ in range(CLIMBS):
        found = _climb(process)
        if found is not None:
            return found
    return True


def _climb(process: Process) -> bool | None:
    """None: somebody on the way up has just ended, and the kernel has given its children to another by then."""
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
    """Whether this process runs a guard, of this release or another."""
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
