"""Share the metrics of all processes of a node through one folder, so that one `/metrics` shows them all.

Each process has its own files, which remain after its end. A sum must not lose the counts of an ended process: that
would look like a restart of every process. So counters of ended processes are added up in one file, and their gauges
are dropped.
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

ENDED = "gone"  #: replaces the process id in a file name
SLACK = 2.0  #: seconds by which a file's time may be earlier than the start of its process
MIN_FREE_BYTES = (
    64 * 2**20
)  #: bytes that must be free: a write to a mapped file on a full disk ends the process (SIGBUS)
START_LOCK_TIMEOUT = 1.0  #: seconds that a start waits for a reader of the folder
READ_LOCK_TIMEOUT = 10.0  #: seconds that a reader waits for earlier readers: Prometheus waits no longer


def share_metrics() -> None:
    """Make this process count in the shared folder.

    Call it before the first count. Every instrument of `scheduling.metrics` has labels, so it creates its file only
    with the first count.
    """
    folder = settings.AFTERTOUCH_METRICS_DIR
    if folder is None or os.environ.get("PROMETHEUS_MULTIPROC_DIR") == str(folder):
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < MIN_FREE_BYTES:
            log.warning("metrics_not_shared", folder=str(folder), free=free, needed=MIN_FREE_BYTES)
            return
        with _lock_folder(folder, START_LOCK_TIMEOUT) as ours:
            if ours:
                merge_ended_processes(folder)
            else:  # the next reader folds them
                log.warning("metrics_not_merged", folder=str(folder))
    except OSError as error:
        log.warning("metrics_not_shared", folder=str(folder), error=str(error))
        return
    except Exception:
        log.exception("metrics_not_shared", folder=str(folder))
        return
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    # The library chooses at import, and Flower's plug-in for Celery's command line imports it before this code runs.
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def export_process_metrics(folder: Path | None = None) -> bytes:
    """Return the metrics of this node's processes, or of this process if nothing is shared."""
    if folder is None and values.ValueClass is values.MutexValue:
        return generate_latest(REGISTRY)
    folder = folder or Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    registry = CollectorRegistry()
    with _lock_folder(folder, READ_LOCK_TIMEOUT) as ours:
        if not ours:
            raise TimeoutError("another process reads the counts for too long")
        merge_ended_processes(folder)
        multiprocess.MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
        return generate_latest(registry)


@contextmanager
def _lock_folder(folder: Path, time_limit: float) -> Iterator[bool]:
    """Lock the folder, so that no file is folded while another process reads it.

    Yields False if the lock is not free within the given seconds: its holder may hang.
    """
    with (folder / "lock").open("a") as lock:
        gives_up_at = time.monotonic() + time_limit
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


def merge_ended_processes(folder: Path) -> None:
    """Add the values of ended processes to the totals and delete their files."""
    for total in folder.glob(f"*_{ENDED}.db"):
        # Move an unreadable file of totals aside. It would fail every later fold and scrape.
        try:
            multiprocess.MultiProcessCollector.merge([str(total)], accumulate=False)  # type: ignore[no-untyped-call]
        except Exception:
            aside = total.with_name(f"{total.name}.spoiled")  # not *.db, which would be read
            log.exception("metrics_file_corrupt", file=total.name, kept_as=aside.name)
            total.replace(aside)
    for path in folder.glob("*_*.db"):
        kind, _, owner = path.stem.rpartition("_")
        if not owner.isdecimal() or _is_writer_alive(int(owner), path):
            continue
        if not kind.startswith("gauge"):
            _add_counts(path, folder / f"{kind}_{ENDED}.db")
        path.unlink()


def _is_writer_alive(pid: int, path: Path) -> bool:
    """Return whether the process that wrote the file is alive.

    The operating system reuses process ids, most often after a reboot. A process that started after the last write is
    another one.
    """
    try:
        return float(psutil.Process(pid).create_time()) <= path.stat().st_mtime + SLACK
    except psutil.NoSuchProcess:
        return False


def _add_counts(path: Path, total: Path) -> None:
    try:
        counts = [(key, value) for key, value, *_ in MmapedDict.read_all_values_from_file(str(path))]  # type: ignore[no-untyped-call]
    except Exception as error:  # the process was killed while it created the file
        log.warning("metrics_file_unreadable", file=path.name, error=str(error))
        return
    sums = MmapedDict(str(total))  # type: ignore[no-untyped-call]
    for key, value in counts:
        sums.write_value(key, sums.read_value(key)[0] + value, 0.0)  # type: ignore[no-untyped-call]
    sums.close()  # type: ignore[no-untyped-call]
