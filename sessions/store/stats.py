"""What each watcher says of itself, for people to see, kept in the store for a minute; and how many silences all of
them have handed in."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings

from sessions.policy import DEFAULT_TAG
from sessions.rates import Recent
from sessions.store import keys
from sessions.store.client import text
from sessions.store.sessions import Claim, Store, instant

FRESH = 60_000  #: ms


class Report:
    """Counts since the start, and the worst since the last time it was sent."""

    def __init__(self) -> None:
        self.handed_in = 0
        self.latest_ms = 0  #: how long after its deadline the latest was claimed
        self.recent = Recent()
        self.unsent: Counter[str] = Counter()  #: by tag

    def count(self, silences: Sequence[Claim], now_ms: int) -> None:
        if not silences:
            return
        self.handed_in += len(silences)
        self.recent.add(len(silences))
        self.unsent.update(each.tag for each in silences)
        self.latest_ms = max([self.latest_ms, *(now_ms - each.deadline_ms for each in silences)])


@dataclass(frozen=True, slots=True)
class WatcherState:
    name: str  #: node and process
    seen_at: datetime
    handed_in: int  #: silences since it was started
    latest_ms: int  #: the worst lateness of a claim in the last seconds
    waits: bool  #: for delivery, because too much is undelivered
    last_minute: int = 0  #: silences


def send(store: Store, report: Report, tags: Container[str], *, waits: bool) -> None:
    """Silences of a tag without a policy are counted as the default's: there are no more names than policies. What
    watchers said that are gone is taken away: one that dies and comes back has another name each time."""
    name = f"{settings.AFTERTOUCH_NODE}:{os.getpid()}"
    (seconds, micros), found = store.server.ask(lambda pipe: [pipe.time(), pipe.hgetall(keys.WATCHERS)])
    now_ms = seconds * 1000 + micros // 1000
    gone = [each for each, words in found.items() if now_ms - json.loads(words)["at"] >= FRESH]
    said = {
        "at": now_ms, "handed_in": report.handed_in, "latest_ms": report.latest_ms,
        "last_minute": report.recent.total(), "waits": waits,
    }  # fmt: skip
    counted: Counter[str] = Counter()
    for tag, count in report.unsent.items():
        counted[tag if tag in tags else DEFAULT_TAG] += count
    store.server.ask(
        lambda pipe: [
            *([pipe.hdel(keys.WATCHERS, *gone)] if gone else []),
            pipe.hset(keys.WATCHERS, name, json.dumps(said)),
            pipe.pexpire(keys.WATCHERS, FRESH),
            *(pipe.hincrby(keys.SILENCES, tag, count) for tag, count in counted.items()),
        ]
    )
    report.latest_ms = 0
    report.unsent.clear()


def silences(store: Store) -> dict[str, int]:
    """By tag, how many were handed in since the store was last empty."""
    (found,) = store.server.ask(lambda pipe: [pipe.hgetall(keys.SILENCES)])
    return {text(tag): int(count) for tag, count in sorted(found.items())}


def watchers(store: Store) -> list[WatcherState]:
    """Those that were alive within the last minute."""
    (seconds, _), found = store.server.ask(lambda pipe: [pipe.time(), pipe.hgetall(keys.WATCHERS)])
    states = []
    for name, said in found.items():
        told: dict[str, Any] = json.loads(said)
        at = told.pop("at")
        if seconds * 1000 - at < FRESH:
            states.append(WatcherState(text(name), instant(at), **told))
    return sorted(states, key=lambda state: state.name)
