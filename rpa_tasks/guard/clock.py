"""The guard's clock."""

from __future__ import annotations

import time


def clock() -> float:
    """Seconds that go on while the machine sleeps, as the lease in the database does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def in_clock(instant: float) -> float:
    """The runner counts by `time.monotonic()`."""
    return instant + clock() - time.monotonic()
