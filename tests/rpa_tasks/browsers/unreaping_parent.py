"""Act as a PID 1 that reaps nothing, above a worker whose child acquires a browser.

    python unreaping_parent.py PROFILE WAIT

prints {"worker": pid}. The rest is as in acquiring_process.py. The worker stops when the input closes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from rpa_tasks.supervisor.processes import adopt_orphans


def main(words: list[str]) -> None:
    if words[0] == "worker":
        run_worker(words[1:])
        return
    adopt_orphans()
    worker = subprocess.Popen([sys.executable, __file__, "worker", *words])
    print(json.dumps({"worker": worker.pid}), flush=True)
    while True:
        time.sleep(3600)


def run_worker(words: list[str]) -> None:
    import django

    django.setup()
    from rpa_tasks.maintainer import process

    process.STOP_WITHIN = 120.0
    process.INTERVAL = 0.2  # so that a test waits less
    process.start_maintainer(["high"])
    script = Path(__file__).with_name("acquiring_process.py")
    subprocess.run([sys.executable, str(script), *words], check=False)
    process.stop_maintainer()


if __name__ == "__main__":
    main(sys.argv[1:])
