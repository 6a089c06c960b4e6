"""Peer: Dramatiq with one delayed message per call, two processes of eight threads and no table.

A delayed message waits in the queue `default.DQ`. A process reads up to 8,000 of them into memory. When one is due, the
process publishes it again to `default`. A process without new messages looks every 0.5 to 1 s.
"""

from __future__ import annotations

import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers.call import BROKER, send_call

WORKER = ("dramatiq", "benchmarks.peers.dramatiq_delay", "--processes", "2", "--threads", "8")

dramatiq.set_broker(RedisBroker(url=BROKER))
send = dramatiq.actor(send_call, actor_name="delayed.send")


def plan_call(name: str, due_at: float) -> None:
    # The broker adds the delay to its own clock, which it reads later. So no message is due early.
    send.send_with_options(args=(name,), delay=max(round(due_at * 1000) - int(time.time() * 1000), 0))
