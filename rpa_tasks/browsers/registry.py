"""What each slot holds, in one small file a slot. Written by rename and only by who has the slot's lock; read by all.

A record is written before its browser is started and removed after the browser is proven gone. So a browser of ours
lives only under the profile that some record names, whatever was killed in between.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from django.conf import settings

LONGEST_NAME = 200
LOCK = ".lock"  #: of a profile, in its directory


def root() -> Path:
    return Path(settings.AFTERTOUCH_STATE_DIR).absolute() / "rpa"


def browsers() -> Path:
    return _made(root() / "browsers")


def logs() -> Path:
    return _made(root() / "logs")


def homes() -> Path:
    return _made(root() / "homes")


def runs() -> Path:
    return _made(root() / "runs")


def workers() -> Path:
    return _made(root() / "workers")


def profiles() -> Path:
    return _made(root() / "profiles")


def profile(profile_id: str) -> Path:
    """The profile's directory. ValueError: no profile id."""
    return _made(profiles() / directory_name(profile_id))


def directory_name(profile_id: str) -> str:
    """A file name that no other profile id has, and that stays inside its folder."""
    if not profile_id:
        raise ValueError("A browser profile needs an id.")
    name = re.sub(r"^\.", "%2E", quote(profile_id, safe=""))
    if len(name) > LONGEST_NAME:
        name = f"{name[:120]}-{hashlib.sha256(profile_id.encode()).hexdigest()[:32]}"
    return name


def profile_lock(profile_id: str) -> Path:
    return profile(profile_id) / LOCK


def slot_lock(slot: int) -> Path:
    return browsers() / f"slot-{slot}.lock"


def slot_record(slot: int) -> Path:
    return browsers() / f"slot-{slot}.json"


def marker(slot: int) -> str:
    """What every process of the slot's browser has in its environment, as `AFTERTOUCH_BROWSER`: it finds them even
    when the record was lost. The path tells two stacks on one machine apart."""
    return str(browsers().resolve() / f"slot-{slot}")


def read_own(path: Path) -> bytes:
    """A file in a directory that a shop's programs may write to: a link in its place is not followed. Raises
    `OSError`."""
    with open(path, "rb", opener=_without_links) as file:
        return file.read(1_000_000)


def write_own(path: Path, text: str) -> None:
    """As `read_own`. Raises `OSError`."""
    with open(path, "w", encoding="utf-8", opener=_without_links) as file:
        file.write(text)


def _without_links(path: str, flags: int) -> int:
    # A named pipe in its place does not make us wait.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


IDLE, BUSY, QUARANTINED = "idle", "busy", "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A slot and its browser. Instants are seconds since the epoch."""

    slot: int
    state: str  #: `busy` with a free lock: whoever had it died
    shop: str = ""
    profile: str = ""
    pid: int = 0  #: 0: it was about to be started
    ticks: int = 0  #: the process's start, in clock ticks since boot: tells it from a later one with the same pid
    port: int = 0
    path: str = ""  #: of its DevTools address; has a random part that no other browser knows
    uses: int = 0
    lease_no: int = 0
    started_at: float = 0.0
    last_used_at: float = 0.0
    checked_at: float = 0.0
    baseline: float = 0.0  #: seconds of its first timed navigation
    reason: str = ""


def read(slot: int) -> Record | None:
    """None: no browser. A file that says nothing readable counts as a browser whose user died."""
    try:
        found = json.loads(slot_record(slot).read_bytes())
        return Record(**{**found, "slot": slot})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return Record(slot=slot, state=BUSY, reason="unreadable")


def write(record: Record) -> None:
    """OSError where the disk is full; the old record then stands."""
    path = slot_record(record.slot)
    draft = path.with_suffix(".tmp")  # one is enough: only one process has the lock
    try:
        draft.write_text(json.dumps(dataclasses.asdict(record)))
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def forget(slot: int) -> None:
    """The slot has no browser any more."""
    slot_record(slot).unlink(missing_ok=True)


def slots(most: int) -> list[int]:
    """1 to `most`, and those beyond that still hold a browser since `most` was lowered."""
    beyond = {int(found[1]) for name in os.listdir(browsers()) if (found := re.match(r"slot-(\d+)\.json$", name))}
    return sorted(beyond.union(range(1, most + 1)))


def records(most: int) -> dict[int, Record | None]:
    return {slot: read(slot) for slot in slots(most)}


_held: set[Lock] = set()


class Lock:
    """An exclusive flock. Open it after the fork: a descriptor that was inherited shares the lock instead of
    competing for it. Close-on-exec keeps it from commands, and `_forget_in_child` from children that never exec."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def take(self) -> bool:
        """Take it if nobody has it. Never waits. OSError where the file cannot be made."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._descriptor = descriptor
        _held.add(self)
        return True

    def release(self) -> None:
        """Give it up; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        if descriptor is not None:
            # Unlocked by word, not by closing: a child between fork and exec still has the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _forget_in_child() -> None:
    for lock in _held:
        if lock._descriptor is not None:
            os.close(lock._descriptor)  # closing a copy does not unlock
            lock._descriptor = None
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


KEPT = 64


class Use(NamedTuple):
    profile: str
    shop: str
    at: float  #: seconds since the epoch


def remember(profile: str, shop: str) -> None:
    _write(lambda uses: [Use(profile, shop, time.time()), *(use for use in uses if use.profile != profile)])


def forget_recent(folder: str) -> None:
    """The profile of this name, as `places.directory_name` tells it."""
    _write(lambda uses: [use for use in uses if directory_name(use.profile) != folder])


def _write(change: Callable[[list[Use]], list[Use]]) -> None:
    """Nobody waits for this: where somebody else is just writing, it is left out, and the next use puts it in."""
    lock = Lock(browsers() / "recent.lock")
    if not lock.take():
        return
    try:
        path = browsers() / "recent.json"
        path.with_suffix(".tmp").write_text(json.dumps(change(last_uses())[:KEPT]))
        path.with_suffix(".tmp").replace(path)
    finally:
        lock.release()


def last_uses() -> list[Use]:
    """The latest first."""
    try:
        return [Use(*use) for use in json.loads((browsers() / "recent.json").read_bytes())]
    except (OSError, ValueError, TypeError):
        return []
