"""Paths, slot records and locks of browsers in the state directory.

There is one small file per slot. Only the holder of the slot's lock writes it, by rename; any process reads it. A
record is written before its browser starts and removed after the browser's end is proven. So a running browser of the
pool always has its profile in a record, whatever process was killed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from django.conf import settings

LONGEST_NAME = 200
LOCK = ".lock"  #: of a profile, in its directory
UNNEEDED_MARK = ".left"  #: a file in a profile: since when it is not needed, by PostgreSQL's clock


def browser_root() -> Path:
    return Path(settings.AFTERTOUCH_STATE_DIR).absolute() / "rpa"


def browsers_dir() -> Path:
    return _create_directory(browser_root() / "browsers")


def browser_logs_dir() -> Path:
    return _create_directory(browser_root() / "logs")


def homes_dir() -> Path:
    return _create_directory(browser_root() / "homes")


def runs_dir() -> Path:
    return _create_directory(browser_root() / "runs")


def shop_runs_path(name: str) -> Path:
    """Return the path of the folder of a shop's runs, by the directory name of its profile.

    Short, because programs put sockets below it.
    """
    return runs_dir() / hashlib.sha256(name.encode()).hexdigest()[:16]


def run_path(profile_id: str, lease_no: int) -> Path:
    """Return the path of a run's working directory."""
    return shop_runs_path(directory_name(profile_id)) / str(lease_no)


def shop_runs_dir(profile_id: str) -> Path:
    """Return the folder of the working directories of a shop's runs. It is the same for its browser and all its runs.

    Where the worker is root it belongs to root: programs of the shop pass it and cannot replace a directory in it.
    """
    folder = _create_directory(shop_runs_path(directory_name(profile_id)))
    folder.chmod(0o711)
    return folder


def run_slots_dir() -> Path:
    return _create_directory(browser_root() / "slots")


def workers_dir() -> Path:
    return _create_directory(browser_root() / "workers")


def profiles_dir() -> Path:
    return _create_directory(browser_root() / "profiles")


def profile_dir(profile_id: str) -> Path:
    """Return the directory of the profile. Raises `ValueError` for an empty id."""
    return _create_directory(profiles_dir() / directory_name(profile_id))


def directory_name(profile_id: str) -> str:
    """Return a file name that is unique for the profile id and stays inside its folder."""
    if not profile_id:
        raise ValueError("A browser profile needs an id.")
    name = re.sub(r"^\.", "%2E", quote(profile_id, safe=""))
    if len(name) > LONGEST_NAME:
        name = f"{name[:120]}-{hashlib.sha256(profile_id.encode()).hexdigest()[:32]}"
    return name


def profile_lock(profile_id: str) -> Path:
    return profile_dir(profile_id) / LOCK


def slot_lock(slot: int) -> Path:
    return browsers_dir() / f"slot-{slot}.lock"


def slot_record(slot: int) -> Path:
    return browsers_dir() / f"slot-{slot}.json"


def slot_marker(slot: int) -> str:
    """Return the value of `AFTERTOUCH_BROWSER` in the environment of every process of the slot's browser.

    It finds them even after the loss of the record. The path distinguishes two deployments on one machine.
    """
    return str(browsers_dir().resolve() / f"slot-{slot}")


def read_own(path: Path) -> bytes:
    """Read a file in a directory that programs of a shop may write to, without following a link. At most 1 MB.

    Raises: `OSError`.
    """
    with open(path, "rb", opener=_without_links) as file:
        return file.read(1_000_000)


def write_own(path: Path, text: str) -> None:
    """Write a file under the conditions of `read_own`. Raises `OSError`."""
    with open(path, "w", encoding="utf-8", opener=_without_links) as file:
        file.write(text)


def replace_json(path: Path, content: object) -> None:
    """Replace a file by rename, so that each reader finds a whole one. Only one process may write it at a time.

    The draft is a new file: in its place a program of a shop may have put a link. Raises `OSError`, for example on a
    full disk; the old file stays then.
    """
    draft = path.with_suffix(".tmp")
    draft.unlink(missing_ok=True)
    try:
        with open(draft, "x", encoding="utf-8", opener=_without_links) as file:
            json.dump(content, file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _without_links(path: str, flags: int) -> int:
    # A named pipe in its place must not block.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _create_directory(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


# --- the record of a slot -----------------------------------------------------------------------------------------

IDLE, BUSY, QUARANTINED = "idle", "busy", "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A slot and its browser. Instants are seconds since the epoch."""

    slot: int
    state: str  #: `busy` with a free lock: its worker process has died
    shop: str = ""
    profile: str = ""
    pid: int = 0  #: 0: before its start
    ticks: int = 0  #: start in clock ticks since boot; distinguishes it from a later process with this pid
    port: int = 0
    path: str = ""  #: of its DevTools address; has a random part that no other browser knows
    uses: int = 0
    lease_no: int = 0
    started_at: float = 0.0
    last_used_at: float = 0.0
    checked_at: float = 0.0
    reason: str = ""
    launch: str = ""  #: fingerprint of its launch settings
    proxy_port: int = 0  #: of its forwarder
    remote: bool = False  #: it runs elsewhere; the process is the forwarder of its debug port


def read_record(slot: int) -> Record | None:
    """Return the record, or None without a browser. An unreadable file counts as an abandoned browser."""
    try:
        found = json.loads(slot_record(slot).read_bytes())
        return Record(**{**found, "slot": slot})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return Record(slot=slot, state=BUSY, reason="unreadable")


def write_record(record: Record) -> None:
    """Write the record. Raises `OSError`, for example on a full disk; the old record stays then."""
    replace_json(slot_record(record.slot), dataclasses.asdict(record))


def delete_record(slot: int) -> None:
    slot_record(slot).unlink(missing_ok=True)


def read_records() -> dict[int, Record | None]:
    """Return the record of each slot, also of those that hold a browser because the setting was lowered."""
    beyond = {int(found[1]) for name in os.listdir(browsers_dir()) if (found := re.match(r"slot-(\d+)\.json$", name))}
    slots = beyond.union(range(1, settings.AFTERTOUCH_RPA_BROWSERS + 1))
    return {slot: read_record(slot) for slot in sorted(slots)}


def records_in(*states: str) -> list[Record]:
    return [record for record in read_records().values() if record and record.state in states]


def records_of_profile(profile_id: str) -> list[Record]:
    """Return the records that name this profile; at most one."""
    return [record for record in read_records().values() if record and record.profile == profile_id]


# --- locks --------------------------------------------------------------------------------------------------------

_locks_held: set[Lock] = set()


class Lock:
    """An exclusive flock. Open it after the fork: an inherited descriptor shares the lock instead of competing for it.

    Close-on-exec hides it from commands, and `_close_locks_in_child` from children that never exec.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def try_acquire(self) -> bool:
        """Try to take the lock, without waiting. Raises `OSError` if the file cannot be created."""
        return self._take(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def acquire(self) -> None:
        """Wait for the lock. Raises `OSError` if the file cannot be created."""
        self._take(fcntl.LOCK_EX)

    def _take(self, operation: int) -> bool:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, operation)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        _locks_held.add(self)
        return True

    def release(self) -> None:
        """Release the lock. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        _locks_held.discard(self)
        if descriptor is not None:
            # Unlocked explicitly: a child between fork and exec still has the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


@contextmanager
def homes_lock() -> Iterator[None]:
    """Hold the lock of all homes while a run takes its home, or a deletion sets one aside: microseconds."""
    lock = Lock(browser_root() / "homes.lock")
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _close_locks_in_child() -> None:
    for lock in _locks_held:
        if lock._descriptor is not None:
            os.close(lock._descriptor)  # closing a copy does not unlock
            lock._descriptor = None
    _locks_held.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)
