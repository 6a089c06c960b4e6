"""Clock that runner and supervisor process share."""

from __future__ import annotations

import time


def clock() -> float:
    """Return seconds that include the sleep of the machine, as the lease in PostgreSQL does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
