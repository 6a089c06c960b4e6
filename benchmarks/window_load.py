"""Publish batches that a window refuses or a waiting job takes: `python -m benchmarks.window_load NUMBER BATCHES`.

Prints `ready`, waits for a line, and prints the counts by result and the processor seconds as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from random import Random

SHOPS, BATCH = 1_000, 500
FLOWS = ("ended", "waiting")


def main() -> int:
    import django

    django.setup()
    from rpa_tasks.jobs.publish import PublishRequest, Receipt, publish_many

    number, batches = int(sys.argv[1]), int(sys.argv[2])
    random = Random(number)
    counts: Counter[str] = Counter()
    publish_many([PublishRequest("bench", "s0", "ended")])  # connects
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.process_time()
    for _ in range(batches):
        requests = [
            PublishRequest("bench", f"s{shop}", FLOWS[place % 2], {"page": place}, source=f"client {number}")
            for place, shop in enumerate(random.sample(range(SHOPS), BATCH))
        ]
        for result in publish_many(requests):
            counts[(result.because or "new") if isinstance(result, Receipt) else type(result).__name__] += 1
    print(json.dumps({"counts": counts, "seconds": time.process_time() - before}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
