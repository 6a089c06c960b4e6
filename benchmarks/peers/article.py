"""Peer: the article's dispatcher. One loop scans a sorted set in Redis, and ten threads run the tasks.

Written from its description: a scan takes up to 100 tasks. A second check before each task prevents two dispatchers
from running it. No durable store, no guard.
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


def run_dispatcher(url: str) -> None:
    client = redis.Redis.from_url(url, decode_responses=True, max_connections=THREADS + 1)
    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            due = client.zrangebyscore(DUE, 0, time.time(), start=0, num=SCAN, withscores=True)
            if due:
                list(pool.map(lambda each: run_task(client, *each), due))
            else:
                time.sleep(IDLE)


def run_task(client: redis.Redis, name: str, due_at: float) -> None:
    """Run the task if this dispatcher removes it: the article's second check."""
    if client.zrem(DUE, name):
        client.rpush(LATENESS, time.time() - due_at)


if __name__ == "__main__":
    run_dispatcher(sys.argv[1])
