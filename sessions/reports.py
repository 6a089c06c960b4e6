"""What each watcher says of itself, for people to see: kept in the store for a minute."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings

from sessions import keys
from sessions.server import text
from sessions.store import Claim, Store, instant

FRESH = 60_000  #: ms


class Report:
    """Counts since the start, and the worst since the last time it was sent."""

    def __init__(self) -> None:
        self.handed_in = 0
        self.latest_ms = 0  #: how long after its deadline the latest was claimed

    def count(self, silences: Sequence[Claim], now_ms: int) -> None:
        self.handed_in += len(silences)
        self.latest_ms = max([self.latest_ms, *(now_ms - each.deadline_ms for each in silences)])


@dataclass(frozen=True, slots=True)
class WatcherState:
    name: str  #: node and process
    seen_at: datetime
    handed_in: int  #: silences since it was started
    latest_ms: int  #: the worst lateness of a claim in the last seconds
    waits: bool  #: for delivery, because too much is undelivered


def send(store: Store, report: Report, *, waits: bool) -> None:
    name = f"{settings.AFTERTOUCH_NODE}:{os.getpid()}"
    seconds, micros = store.server.ask(lambda pipe: [pipe.time()])[0]
    said = {"at": seconds * 1000 + micros // 1000, **vars(report), "waits": waits}
    store.server.ask(
        lambda pipe: [pipe.hset(keys.WATCHERS, name, json.dumps(said)), pipe.pexpire(keys.WATCHERS, FRESH)]
    )
    report.latest_ms = 0


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
