"""Find out which run a process belongs to, and end what earlier or lost runs left on this node.

A supervisor process adopts its orphaned descendants, so it is an ancestor of the whole run as long as it lives, and its
command line names the run. A flow can write any environment, but it cannot choose its ancestors. So the markers in an
environment count only for a process without a supervisor process: that was killed, and the kernel killed the command
with it, but not what the command had started. No database is asked: another node may serve the shop as soon as the
lease expires.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import structlog
from django.conf import settings

from rpa_tasks.supervisor.processes import (
    Process,
    all_processes,
    end_processes,
    is_nested,
    read_environment,
    read_file,
    read_process,
    real_uid,
)

log = structlog.get_logger(__name__)

#: Environment variables of every process of a run, and words of its supervisor process's command line. The state
#: directory distinguishes the nodes of one machine.
TASK_ID, LEASE_NO, SHOP, STATE_DIR = MARKERS = (
    "AFTERTOUCH_TASK_ID", "AFTERTOUCH_LEASE_NO", "AFTERTOUCH_SHOP", "AFTERTOUCH_STATE_DIR",
)  # fmt: skip
#: Command line of a supervisor process without the folder, because another release may run from another folder.
SUPERVISOR = (b"-I", b"-S", b"rpa_tasks/supervisor/main.py")
#: Seconds between SIGTERM and SIGKILL for the rest of a run without a supervisor process.
SWEEP_GRACE = 2.0


def state_dir() -> str:
    """Return the value of `STATE_DIR` on this node."""
    return os.path.abspath(settings.AFTERTOUCH_STATE_DIR)


class AncestorsUnknown(Exception):
    """The process or one of its ancestors has just ended. The next pass asks again."""


class Ancestry:
    """A snapshot of all processes, made at the first question, with the supervisor process above each."""

    def __init__(self) -> None:
        #: By pid: the markers of the outermost supervisor process among this process and its ancestors.
        self._runs: dict[int, dict[str, str] | None] = {0: None, os.getpid(): None}

    @cached_property
    def _processes(self) -> dict[int, Process]:
        return {process.pid: process for process in all_processes()}

    def has_supervisor(self, process: Process) -> bool:
        """Return whether an ancestor is a supervisor process. Also True if this is unknown."""
        try:
            return self.find_run(process) is not None
        except AncestorsUnknown:
            return True

    def find_run(self, process: Process) -> dict[str, str] | None:
        """Return the markers that the process has from its supervisor process; None without one.

        The outermost one counts: a flow can start a process that looks like one.

        Raises: `AncestorsUnknown`.
        """
        path: list[int] = []
        below, pid = process, process.pid
        while pid not in self._runs:
            above = self._processes.get(pid)
            if above is None or pid in path or (not path and above.started != process.started):
                if path and _is_child_of(below, pid):
                    self._runs[pid] = None  # /proc hides processes of other users
                    break
                raise AncestorsUnknown
            path.append(pid)
            below, pid = above, above.parent
        run = self._runs[pid]
        for pid in reversed(path):
            self._runs[pid] = run = read_supervisor_markers(pid) if run is None else run
        return run


def _is_child_of(process: Process, parent: int) -> bool:
    now = read_process(process.pid)
    hidden = read_process(parent) is None
    return hidden and now is not None and (now.started, now.parent) == (process.started, parent)


def read_supervisor_markers(pid: int) -> dict[str, str] | None:
    """Return the markers on the command line of a supervisor process, of this release or another; None: it is none."""
    words = read_file(f"/proc/{pid}/cmdline").split(b"\0")
    is_one = len(words) > 3 and tuple(words[1:3]) == SUPERVISOR[:2] and words[3].endswith(SUPERVISOR[2])
    # An isolated flow can start such a program, but only in a pid namespace below this one.
    if not is_one or real_uid(pid) != os.getuid() or is_nested(pid):
        return None
    return dict(os.fsdecode(word).split("=", 1) for word in words[4:] if b"=" in word)


@dataclass(frozen=True, slots=True)
class RunProcess:
    """A process of a run on this node."""

    process: Process
    markers: Mapping[str, str]  #: the values of `MARKERS`
    is_supervised: bool


def list_run_processes() -> list[RunProcess]:
    """Return the processes of runs on this node. Those of another state directory belong to another node."""
    found = [(process, read_environment(process.pid, having=TASK_ID)) for process in all_processes()]
    ancestry, listed = Ancestry(), []
    for process, claimed in found:
        if TASK_ID not in claimed:
            continue
        with suppress(AncestorsUnknown):
            run = ancestry.find_run(process)
            markers = claimed if run is None else run
            if markers.get(STATE_DIR) == state_dir():
                values = {name: markers.get(name, "") for name in MARKERS}
                listed.append(RunProcess(process, values, run is not None))
    return listed


def end_marked_processes(match: Callable[[Mapping[str, str]], bool]) -> list[int]:
    """End the processes of earlier runs on this node whose markers `match`: SIGTERM, two seconds, SIGKILL.

    Returns the pids whose end is not proven. Takes at most about seven seconds, and milliseconds without processes.
    """
    left = end_processes(lambda: [each.process for each in list_run_processes() if match(each.markers)], SWEEP_GRACE)
    if left:
        log.error("sweep_left_processes", pids=[process.pid for process in left])
    return [process.pid for process in left]


def end_unsupervised() -> int:
    """End processes of runs whose supervisor process was killed. Returns how many processes of runs remain."""

    def find() -> list[Process]:
        return [each.process for each in list_run_processes() if not each.is_supervised]

    if doomed := find():
        log.warning("orphaned_processes_ended", pids=[process.pid for process in doomed])
        if left := end_processes(find, SWEEP_GRACE):
            log.error("orphaned_processes_left", pids=[process.pid for process in left])
    return len(list_run_processes())
