"""Find and end processes of runs by their markers.

Every process of a run has the markers in its environment, where its flow can change them. While a supervisor process
lives, its own markers count instead, because a flow cannot choose its ancestors (`rpa_tasks.supervisor.ancestry`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

import structlog
from django.conf import settings

from rpa_tasks.supervisor import processes
from rpa_tasks.supervisor.ancestry import AncestorsUnknown, Known, run_of

log = structlog.get_logger(__name__)

#: Environment variables of every process of a run, by which hidden descendants are found. The state directory
#: distinguishes the nodes of one machine.
TASK_ID, LEASE_NO, SHOP, STATE_DIR = MARKERS = (
    "AFTERTOUCH_TASK_ID", "AFTERTOUCH_LEASE_NO", "AFTERTOUCH_SHOP", "AFTERTOUCH_STATE_DIR",
)  # fmt: skip
#: Seconds between SIGTERM and SIGKILL for the rest of a run without a supervisor process.
SWEEP_GRACE = 2.0


def state_dir() -> str:
    """Return the value of `STATE_DIR` on this node."""
    return os.path.abspath(settings.AFTERTOUCH_STATE_DIR)


def marked_processes() -> Iterator[tuple[processes.Process, dict[str, str]]]:
    """Yield every process of a run on this node with its values of `MARKERS`."""
    known: Known = {}
    for process in processes.all_processes(_claims_markers):
        if marks := _markers_of(process, known):
            yield process, marks


def _claims_markers(pid: int) -> bool:
    return bool(processes.read_environment(pid, having=TASK_ID))


def _markers_of(process: processes.Process, known: Known) -> dict[str, str] | None:
    claimed = processes.read_environment(process.pid, having=TASK_ID)
    if TASK_ID not in claimed:
        return None
    try:
        marks = run_of(process, known) or claimed
    except AncestorsUnknown:
        return None
    return {name: marks.get(name, "") for name in MARKERS} if marks.get(STATE_DIR) == state_dir() else None


def end_marked_processes(match: Callable[[Mapping[str, str]], bool]) -> list[int]:
    """End the processes of earlier runs on this node whose markers `match`: SIGTERM, two seconds, SIGKILL.

    `match` gets the values of `MARKERS`. Runs of another state directory belong to another node and are not touched.

    Returns the pids whose end is not proven. Takes at most about seven seconds, and milliseconds without processes.
    """

    def find() -> list[processes.Process]:
        return [each for each, marks in marked_processes() if match(marks)]

    left = processes.end_processes(find, SWEEP_GRACE)
    if left:
        log.error("sweep_left_processes", pids=[process.pid for process in left])
    return [process.pid for process in left]
