"""Peer: the article's detector. One key with a time to live per session, and a listener to its expiry events.

Written from its description: one message per user within a window, by SET NX. The key's name contains its expiry
time.
"""

from __future__ import annotations

import sys
import time

import redis

LATENESS = "expired:lateness"
PREFIX = "session:"
WINDOW = 60  # seconds


def key(number: int, expires_at: float) -> str:
    return f"{PREFIX}{number}:{expires_at:.3f}"


def listen_for_expiry(url: str) -> None:
    client = redis.Redis.from_url(url, decode_responses=True)
    database = url.rsplit("/", 1)[1]
    listener = client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(f"__keyevent@{database}__:expired")
    client.set("expired:listening", 1)
    for message in listener.listen():
        heard_at, name = time.time(), message["data"]
        if name.startswith(PREFIX) and client.set(f"nudged:{name}", 1, nx=True, ex=WINDOW):
            client.rpush(LATENESS, heard_at - float(name.rsplit(":", 1)[1]))


if __name__ == "__main__":
    listen_for_expiry(sys.argv[1])
