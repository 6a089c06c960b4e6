"""Peer: the article's dispatcher. One loop scans a sorted set in Redis, and ten threads make the calls.

Written from its description: a scan takes up to 100 tasks. A second check before each task prevents two dispatchers
from running it. No durable store, no guard, no retry.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import redis
import requests

from benchmarks.peers.call import BROKER, RECEIVER, build_call

DUE = "article:due"
SCAN = 100
THREADS = 10
IDLE = 0.5

_thread = threading.local()


def run_dispatcher() -> None:
    client = redis.Redis.from_url(BROKER, decode_responses=True, max_connections=THREADS + 1)
    with ThreadPoolExecutor(THREADS, initializer=_open_session) as pool:
        while True:
            due = client.zrangebyscore(DUE, 0, time.time(), start=0, num=SCAN)
            if due:
                list(pool.map(lambda name: run_task(client, name), due))
            else:
                time.sleep(IDLE)


def _open_session() -> None:
    _thread.session = requests.Session()
    _thread.session.trust_env = False


def run_task(client: redis.Redis, name: str) -> None:
    """Make the call if this dispatcher removes it: the article's second check."""
    if client.zrem(DUE, name):
        body, headers = build_call(name)
        _thread.session.post(os.environ[RECEIVER], data=body, headers=headers).raise_for_status()


if __name__ == "__main__":
    run_dispatcher()
