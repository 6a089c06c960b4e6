"""At most so many runs a node, whatever number of workers it has: one kernel lock a slot.

A lock dies with its process, so a slot cannot leak. It is taken in the process that runs the job, after the fork: a
lock that is inherited excludes nobody.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings


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
