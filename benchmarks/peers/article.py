"""The article's dispatcher: a sorted set in Redis, scanned by one loop, worked off by ten threads.

Written to its description: a scan takes up to a hundred, and before a task runs it is looked at a second time, so that
two dispatchers do not both run it. No durable store, no guard.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import redis

DUE = "article:due"
LATENESS = "article:lateness"
SCAN = 100
THREADS = 10
IDLE = 0.5


def dispatch(url: str) -> None:
    client = redis.Redis.from_url(url, decode_responses=True, max_connections=THREADS + 1)
    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            due = client.zrangebyscore(DUE, 0, time.time(), start=0, num=SCAN, withscores=True)
            if due:
                list(pool.map(lambda each: handle(client, *each), due))
            else:
                time.sleep(IDLE)


def handle(client: redis.Redis, name: str, due_at: float) -> None:
    """Whoever removes it has it: the article's second look before a task runs."""
    if client.zrem(DUE, name):
        client.rpush(LATENESS, time.time() - due_at)


if __name__ == "__main__":
    dispatch(sys.argv[1])
