"""Traffic of the silence scenario: sessions that ping, sessions that fall silent, and unrelated keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from random import Random
from uuid import UUID

import redis

from benchmarks.environment import wait_until
from sessions.frames import Frame
from sessions.policy import Policy, PolicySet
from sessions.store.client import Server
from sessions.store.sessions import Store

SHORT, LONG = "short", "long"
SILENT_AFTER = 3.0
TICK = 0.02
PING_EVERY = 15.0
BATCH = 500


def store_policies() -> None:
    """Store two policies: for sessions that fall silent during the measurement, and for the others."""
    from sessions.models import SilencePolicy

    spans = ((SHORT, timedelta(seconds=SILENT_AFTER)), (LONG, timedelta(hours=2)))
    for tag, threshold in spans:
        SilencePolicy.objects.update_or_create(key=tag, defaults={"threshold": threshold})


def open_store(url: str) -> Store:
    tags = {SHORT: Policy(timedelta(seconds=SILENT_AFTER)), LONG: Policy(timedelta(hours=2))}
    return Store(Server(url), lambda: PolicySet(tags))


def make_ids(count: int, random: Random) -> list[str]:
    return [str(UUID(int=random.getrandbits(128))) for _ in range(count)]


def fill_sessions(store: Store, sessions: Sequence[str]) -> None:
    """Send one message per session. Session, user and chat ids have 36 characters."""
    for at in range(0, len(sessions), BATCH):
        store.note_activity([Frame(each, each[::-1], each, tag=LONG) for each in sessions[at : at + BATCH]])


def stable_memory(client: redis.Redis) -> int:
    """Return the used memory in bytes after it has not changed for one second."""
    last, since = -1, time.monotonic()

    def settled() -> bool:
        nonlocal last, since
        now = int(client.info("memory")["used_memory"])
        if abs(now - last) > 10_000:
            last, since = now, time.monotonic()
        return time.monotonic() - since > 1

    wait_until(settled, 60, "memory")
    return last


def fill_others(client: redis.Redis, count: int) -> None:
    """Write unrelated keys with a time to live."""
    step = 10_000
    for first in range(0, count, step):
        client.eval(_OTHERS, 0, first, min(first + step, count) - 1)


class Traffic:
    """Traffic of a thread for `seconds`: pings of all live sessions every 15 s, and `rate` new sessions a second.

    Each new session sends one message. The last one falls silent after the end of the thread.
    """

    def __init__(self, url: str, live: Sequence[str], *, rate: float, seconds: float) -> None:
        self.rate = rate
        self.seconds = seconds
        self.fell_silent = 0
        self._url = url
        self._live = live
        self._thread = threading.Thread(target=self._run, name="traffic")

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        store = open_store(self._url)
        began_at, pinged = time.monotonic(), 0
        while (passed := time.monotonic() - began_at) < self.seconds:
            frames = []
            while pinged < passed * len(self._live) / PING_EVERY:
                each = self._live[pinged % len(self._live)]
                frames.append(Frame(each, each[::-1], kind="ping"))
                pinged += 1
            while self.fell_silent < passed * self.rate:
                self.fell_silent += 1
                frames.append(Frame(f"silent-{self.fell_silent}", f"user-{self.fell_silent}", tag=SHORT))
            if frames:
                store.note_activity(frames)
            time.sleep(TICK)
        store.server.client.close()


_OTHERS = """
for number = ARGV[1], ARGV[2] do redis.call('SET', 'other:' .. number, 'x', 'EX', 86400 + number % 1000) end
"""
