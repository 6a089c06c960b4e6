"""The execution node of this machine: name, run slots, notes of its workers about their queues, and stop flag.

There is one kernel lock per run slot, whatever number of workers the node has. A lock ends with its process, so a slot
cannot leak. The process that runs the job takes it after the fork, because an inherited lock excludes no process.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from django.conf import settings

from rpa_tasks.browsers import registry
from rpa_tasks.jobs.ledger import NODE_SILENT
from rpa_tasks.supervisor.processes import is_alive, read_process
from scheduling import sql


@contextmanager
def acquire_run_slot() -> Iterator[int | None]:
    """Hold a free run slot; None if all are taken."""
    for number in range(settings.AFTERTOUCH_RPA_SLOTS):
        lock = registry.Lock(registry.run_slots_dir() / str(number))
        if lock.try_acquire():
            try:
                yield number
            finally:
                lock.release()
            return
    yield None


#: Shared by the processes of a worker: 1 once it stops. Without a lock: a child that is killed during a read of a
#: `multiprocessing.Event` keeps its lock forever.
stopping = mmap.mmap(-1, 1)


def record_worker(queues: Sequence[str], processes: int = 0) -> None:
    """Record the queues and the number of child processes (0: unknown) of this worker.

    Raises: `OSError`, for example if the disk is full.
    """
    me = read_process(os.getpid())
    assert me is not None
    path = registry.workers_dir() / f"{me.pid}-{me.started}.json"
    registry.replace_json(path, {"queues": list(queues), "processes": processes})


def served_queues() -> list[str]:
    """Return the queues of the node's workers that run, or ran within the lease of a preferred node."""
    return list(dict.fromkeys(queue for note, _ in _worker_records() for queue in note["queues"]))


def count_slots() -> int:
    """Return how many jobs the node can run at once: at most the number of processes of its running workers."""
    processes = [int(note["processes"]) for note, runs in _worker_records() if runs]
    known = sum(processes) if all(processes) else 0
    return min(settings.AFTERTOUCH_RPA_SLOTS, known or settings.AFTERTOUCH_RPA_SLOTS)


def _worker_records() -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield each record, and whether its worker runs.

    A worker that ran within the lease of a preferred node counts: a restart must not move its shops. The modification
    time of the file is the last time the worker was seen running; in the future, if the clock was set back since.
    """
    for path in sorted(registry.workers_dir().glob("*.json")):
        with suppress(OSError, ValueError):
            pid, ticks = map(int, path.stem.split("-"))
            if runs := is_alive(pid, ticks):
                os.utime(path)
            elif abs(time.time() - path.stat().st_mtime) > settings.AFTERTOUCH_RPA_HOME_LEASE.total_seconds():
                path.unlink()
                continue
            note = json.loads(path.read_bytes())
            if isinstance(note, dict) and note.keys() >= {"queues", "processes"}:  # else no worker of ours wrote it
                yield note, runs


def claim_node_name() -> bool:
    """Take the name for this state directory. Returns False while workers of another one renew it.

    Shops that prefer a node would go to either of two with one name.

    The workers of a machine share its state directory, so a crashed node takes its name again at once. A machine that
    is replaced waits until the name has been silent for `NODE_SILENT`. Of machines that ask at once one gets it.
    """
    given = {"name": settings.AFTERTOUCH_NODE, "slots": settings.AFTERTOUCH_RPA_SLOTS, "silent": NODE_SILENT}
    return bool(sql.rows(_CLAIM, given | {"state_id": read_state_id(settings.AFTERTOUCH_STATE_DIR)}))


def read_state_id(state_dir: Path) -> str:
    """Return the id of a state directory, which the first reader makes."""
    path = state_dir / "node.id"
    with suppress(FileNotFoundError):
        return path.read_text()
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = str(uuid4())
    own = path.with_name(made)
    own.write_text(made)
    with suppress(FileExistsError):
        os.link(own, path)  # of several readers one makes it, complete
    own.unlink()
    return path.read_text()


_CLAIM = """
INSERT INTO rpa_tasks_executionnode AS node (name, state_id, seen_at, started_at, slots, queues, browsers)
VALUES (%(name)s, %(state_id)s, statement_timestamp(), statement_timestamp(), %(slots)s, '[]', '[]')
ON CONFLICT (name) DO UPDATE SET state_id = EXCLUDED.state_id, seen_at = EXCLUDED.seen_at
WHERE node.state_id IN ('', EXCLUDED.state_id) OR node.seen_at < statement_timestamp() - %(silent)s
RETURNING name
"""
