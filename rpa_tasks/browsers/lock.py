"""Kernel locks on files: gone with the process that holds them, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

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
