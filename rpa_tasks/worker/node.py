"""At most so many runs a node, whatever number of workers it has: one kernel lock a slot.

A lock dies with its process, so a slot cannot leak. It is taken in the process that runs the job, after the fork: a
lock that is inherited excludes nobody.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.conf import settings

from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_processes import is_alive
from rpa_tasks.supervisor.processes import look


@contextmanager
def slot() -> Iterator[int | None]:
    """Hold a free slot; None where all are taken."""
    folder = Path(settings.AFTERTOUCH_STATE_DIR) / "rpa" / "slots"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(settings.AFTERTOUCH_RPA_SLOTS):
        handle = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            continue
        try:
            yield number
        finally:
            os.close(handle)
        return
    yield None


class Flag:
    """A byte that processes share, without a lock. `multiprocessing.Event` has one even for a look: a child that is
    killed with SIGKILL while it looks keeps it for ever, and all other runs of the node wait for it."""

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._byte[0] = 1

    def clear(self) -> None:
        self._byte[0] = 0

    def is_set(self) -> bool:
        return self._byte[0] != 0


stopping = Flag()


def note(queues: Sequence[str], processes: int = 0) -> None:
    """Say what this process, a worker, consumes, with how many child processes (0: unknown). OSError where the disk is
    full."""
    me = look(os.getpid())
    assert me is not None
    path = registry.workers() / f"{me.pid}-{me.started}.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"queues": list(queues), "processes": processes}))
    draft.replace(path)


def carried() -> list[str]:
    """The queues of the workers that live, or did a moment ago."""
    return list(dict.fromkeys(queue for note in _notes() for queue in note["queues"]))


def slots() -> int:
    """How many jobs the node can run at once: no more than its workers have processes."""
    processes = [int(note["processes"]) for note in _notes()]
    known = sum(processes) if all(processes) else 0
    return min(settings.AFTERTOUCH_RPA_SLOTS, known or settings.AFTERTOUCH_RPA_SLOTS)


def _notes() -> Iterator[dict[str, Any]]:
    for path in sorted(registry.workers().glob("*.json")):
        with suppress(OSError, ValueError):
            if _counts(path):
                found = json.loads(path.read_bytes())
                yield found if isinstance(found, dict) else {"queues": found, "processes": 0}


def _counts(path: Path) -> bool:
    """Whether the worker lives, or did within the lease of a preferred node: a restart must not move its shops. The
    file's time is when the worker was last seen alive."""
    pid, ticks = map(int, path.stem.split("-"))
    if is_alive(pid, ticks):
        os.utime(path)
    elif time.time() - path.stat().st_mtime > settings.AFTERTOUCH_RPA_HOME_LEASE.total_seconds():
        path.unlink()
        return False
    return True
