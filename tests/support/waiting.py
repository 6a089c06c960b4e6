"""How long a test waits for what must happen.

A test waits for a condition, never for a time. The limit only ends a wait for what never comes, so it measures no
pace. It is below every time limit of a test, see `time_limits`.
"""

from __future__ import annotations

WAIT_LIMIT = 240.0  #: seconds
WAIT_LIMIT_MS = WAIT_LIMIT * 1000
