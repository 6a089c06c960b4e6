"""The clock of runner and guard: what one sends, the other understands as it is."""

from __future__ import annotations

import time


def clock() -> float:
    """Seconds that go on while the machine sleeps, as the lease in the database does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
