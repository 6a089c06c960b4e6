"""One folder a node, in which its processes keep what they count, so that one `/metrics` shows them all.

Each process has files of its own, which outlive it: what it counted must not vanish from a sum, because that would look
like a restart of everything. So the counts of those that are gone are added up in one file, and what they said about
the present (their gauges) is dropped.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]
import structlog
from django.conf import settings
from prometheus_client import CollectorRegistry, generate_latest, multiprocess, values
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.registry import REGISTRY

log = structlog.get_logger(__name__)

GONE = "gone"  #: in the place of a process id
SLACK = 2.0  #: seconds by which a file's time may be behind its process's
ROOM = 64 * 2**20  #: bytes that have to be free: writing to a mapped file on a full disk ends the process (SIGBUS)
PATIENCE = 1.0  #: seconds that a start waits for whoever reads the folder
TURN = 10.0  #: seconds that a reader waits for those before it: Prometheus waits no longer


def share() -> None:
    """From now on this process counts in the folder. Before anything is counted: every instrument of
    `scheduling.metrics` has labels, so it takes its place only with the first count."""
    folder = settings.AFTERTOUCH_METRICS_DIR
    if folder is None or os.environ.get("PROMETHEUS_MULTIPROC_DIR") == str(folder):
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < ROOM:
            log.warning("measures_not_shared", folder=str(folder), free=free, needed=ROOM)
            return
        _fold_if_free(folder)
    except OSError as error:
        log.warning("measures_not_shared", folder=str(folder), error=str(error))
        return
    except Exception:
        log.exception("measures_not_shared", folder=str(folder))
        return
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    # Chosen when the library is imported, which Flower's plug-in for Celery's command line does before us.
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def exposition(folder: Path | None = None) -> bytes:
    """What this node's processes counted; where nothing is shared, this process."""
    if folder is None and values.ValueClass is values.MutexValue:
        return generate_latest(REGISTRY)
    folder = folder or Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    registry = CollectorRegistry()
    with _alone(folder, TURN) as ours:
        if not ours:
            raise TimeoutError("somebody has been reading the counts for too long")
        _fold(folder)
        multiprocess.MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
        return generate_latest(registry)


@contextmanager
def _alone(folder: Path, patience: float) -> Iterator[bool]:
    """No file is folded while somebody reads it. Whether it is our turn: who reads may hang, and is not waited for."""
    with (folder / "lock").open("a") as lock:
        gives_up_at = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= gives_up_at:
                    yield False
                    return
                time.sleep(0.05)
            else:
                yield True
                return


def _fold_if_free(folder: Path) -> None:
    """The next one who asks folds as well, so nobody waits for long to start."""
    with _alone(folder, PATIENCE) as ours:
        if ours:
            _fold(folder)
        else:
            log.warning("measures_not_folded", folder=str(folder))


def _fold(folder: Path) -> None:
    for total in folder.glob(f"*_{GONE}.db"):
        _set_aside_if_spoiled(total)
    for path in folder.glob("*_*.db"):
        kind, _, owner = path.stem.rpartition("_")
        if not owner.isdecimal() or _lives(int(owner), path):
            continue
        if not kind.startswith("gauge"):
            _add(path, folder / f"{kind}_{GONE}.db")
        path.unlink()


def _set_aside_if_spoiled(total: Path) -> None:
    """What cannot be read would fail whoever adds to it or asks for it, again and again."""
    try:
        multiprocess.MultiProcessCollector.merge([str(total)], accumulate=False)  # type: ignore[no-untyped-call]
    except Exception:
        aside = total.with_name(f"{total.name}.spoiled")  # not *.db, which would be read
        log.exception("measures_spoiled", file=total.name, kept_as=aside.name)
        total.replace(aside)


def _lives(pid: int, path: Path) -> bool:
    """A number may be another process's by now, after a reboot most are; who began after the last write is another."""
    try:
        return float(psutil.Process(pid).create_time()) <= path.stat().st_mtime + SLACK
    except psutil.NoSuchProcess:
        return False


def _add(path: Path, total: Path) -> None:
    try:
        counts = [(key, value) for key, value, *_ in MmapedDict.read_all_values_from_file(str(path))]  # type: ignore[no-untyped-call]
    except Exception as error:  # killed while it made the file
        log.warning("measures_unreadable", file=path.name, error=str(error))
        return
    sums = MmapedDict(str(total))  # type: ignore[no-untyped-call]
    for key, value in counts:
        sums.write_value(key, sums.read_value(key)[0] + value, 0.0)  # type: ignore[no-untyped-call]
    sums.close()  # type: ignore[no-untyped-call]
