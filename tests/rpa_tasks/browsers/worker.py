"""Act as a worker's main process: start a maintainer, print its pid, and stop when the input closes.

With `fork` it has a child that inherits everything and survives.
"""

from __future__ import annotations

import os
import sys
import time

import django

django.setup()

from rpa_tasks.maintainer import process  # noqa: E402


def main() -> None:
    process.STOP_WITHIN = 120.0  # a slow machine needs longer to end browsers
    process.INTERVAL = 0.2  # so that a test waits less
    process.start_maintainer(["high", "low"])
    supervision = process._supervision
    assert supervision is not None
    while supervision.pid is None:
        time.sleep(0.01)
    child = os.fork() if "fork" in sys.argv else 0
    if "fork" in sys.argv and child == 0:
        time.sleep(600)
        os._exit(0)
    print(supervision.pid, child, flush=True)
    for _ in sys.stdin:
        print(supervision.pid, child, flush=True)
    process.stop_maintainer()


if __name__ == "__main__":
    main()
