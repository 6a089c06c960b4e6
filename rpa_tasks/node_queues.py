"""What a node carries: the queues that all its execution workers consume together. Each notes its own in a file, for
whichever of their maintainers describes the node."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rpa_tasks.guard.processes import look
from rpa_tasks.lanes import HOME_LEASE
from rpa_tasks.pool import places
from rpa_tasks.pool.browser_processes import is_alive

#: What a worker carried counts for so long after its end: one that is restarted must not cost its shops their home.
REMEMBERED = HOME_LEASE


def note(queues: Sequence[str]) -> None:
    """Say what this process, a worker, consumes. OSError where the disk is full."""
    me = look(os.getpid())
    assert me is not None
    path = places.workers() / f"{me.pid}-{me.started}.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(list(queues)))
    draft.replace(path)


def carried() -> list[str]:
    """Of the workers that live, or did a moment ago."""
    found: dict[str, None] = {}
    for path in sorted(places.workers().glob("*.json")):
        with suppress(OSError, ValueError):
            if _counts(path):
                found |= dict.fromkeys(json.loads(path.read_bytes()))
    return list(found)


def _counts(path: Path) -> bool:
    """The file's time is when its worker was last seen alive."""
    pid, ticks = map(int, path.stem.split("-"))
    if is_alive(pid, ticks):
        os.utime(path)
    elif time.time() - path.stat().st_mtime > REMEMBERED.total_seconds():
        path.unlink()
        return False
    return True
