"""Peer: plain Celery with one `eta` task per call, two processes and no table."""

from __future__ import annotations

import os
import time

import redis
from celery import Celery

URL = os.environ.get("PLAIN_CELERY_URL", "redis://127.0.0.1:1/0")
LATENESS = "plain:lateness"

app = Celery("plain_celery", broker=URL)
app.conf.update(task_ignore_result=True, worker_hijack_root_logger=False)
_client: redis.Redis | None = None


@app.task(name="plain.handle")
def handle(due_at: float) -> None:
    global _client
    if _client is None:
        _client = redis.Redis.from_url(URL)
    _client.rpush(LATENESS, time.time() - due_at)
