"""What a node carries: the queues that all its execution workers consume together. Each notes its own in a file, for
whichever of their maintainers describes the node."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from django.conf import settings

from rpa_tasks.browsers import places
from rpa_tasks.browsers.browser_processes import is_alive
from rpa_tasks.supervisor.processes import look


def note(queues: Sequence[str], processes: int = 0) -> None:
    """Say what this process, a worker, consumes, with how many child processes (0: unknown). OSError where the disk is
    full."""
    me = look(os.getpid())
    assert me is not None
    path = places.workers() / f"{me.pid}-{me.started}.json"
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
    for path in sorted(places.workers().glob("*.json")):
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
