"""What every process of a run carries in its environment, and how those that nobody guards any more are ended by it."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping

import structlog
from django.conf import settings

from rpa_tasks.supervisor import processes

log = structlog.get_logger(__name__)

#: The environment variables that mark every process of a run, so that its descendants are found wherever they hide.
#: The state directory tells the nodes of one machine apart.
TASK_ID, LEASE_NO, SHOP, STATE_DIR = MARKERS = (
    "AFTERTOUCH_TASK_ID", "AFTERTOUCH_LEASE_NO", "AFTERTOUCH_SHOP", "AFTERTOUCH_STATE_DIR",
)  # fmt: skip
#: What is left of a run without a guard gets this long between SIGTERM and SIGKILL.
SWEEP_GRACE = 2.0


def state_dir() -> str:
    """What `STATE_DIR` says on this node."""
    return os.path.abspath(settings.AFTERTOUCH_STATE_DIR)


def marked() -> Iterator[tuple[processes.Process, dict[str, str]]]:
    """Every process of a run on this node, with its values of `MARKERS`."""
    for process in processes.everyone():
        if marks := _marks_of(process):
            yield process, marks


def _marks_of(process: processes.Process) -> dict[str, str] | None:
    environment = processes.environment(process.pid, having=TASK_ID)
    if environment.get(STATE_DIR) != state_dir() or TASK_ID not in environment:
        return None
    return {name: environment.get(name, "") for name in MARKERS}


def sweep(match: Callable[[Mapping[str, str]], bool], *, spares: Container[int] = ()) -> list[int]:
    """End the processes of earlier runs on this node whose markers `match`: SIGTERM, two seconds, SIGKILL.

    `match` gets the values of `MARKERS`. A run can forge them: processes with a uid of `spares` do not count. Runs of
    another state directory are another node's, and left alone. Returns the pids that could not be proven dead; takes at
    most some seven seconds, and milliseconds where there is none.
    """

    def find() -> list[processes.Process]:
        return [each for each, marks in marked() if match(marks) and processes.real_uid(each.pid) not in spares]

    left = processes.end(find, SWEEP_GRACE)
    if left:
        log.error("sweep_left_processes", pids=[process.pid for process in left])
    return [process.pid for process in left]
