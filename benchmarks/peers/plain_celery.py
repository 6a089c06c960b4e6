"""Peer: plain Celery with one `eta` task per call, two processes and no table."""

from __future__ import annotations

from datetime import UTC, datetime

from celery import Celery

from benchmarks.peers.call import BROKER, send_call

WORKER = ("celery", "-A", "benchmarks.peers.plain_celery", "worker", "-c", "2", "-l", "WARNING")

app = Celery("plain_celery")
# `broker_url` would lose to CELERY_BROKER_URL, which Aftertouch's own programs need.
app.conf.update(broker_read_url=BROKER, broker_write_url=BROKER, task_ignore_result=True)
send = app.task(name="plain.send")(send_call)


def plan_call(name: str, due_at: float) -> None:
    send.apply_async((name,), eta=datetime.fromtimestamp(due_at, UTC))
