"""How long a test waits for what must happen.

A test waits for a condition, never for a time. The limit only ends a wait for what never comes, so it measures no
pace. It is below every time limit of a test, see `time_limits`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_LIMIT = 240.0  #: seconds
WAIT_LIMIT_MS = WAIT_LIMIT * 1000


def eventually(
    condition: Callable[[], Any], otherwise: str = "it did not happen", *, within: float = WAIT_LIMIT,
    pause: float = 0.03,
) -> Any:  # fmt: skip
    """Wait until the condition is true and return what it gives."""
    ends_at = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < ends_at, otherwise
        time.sleep(pause)
    return found
