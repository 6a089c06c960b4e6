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
from sessions.store import client
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
    (seconds, micros), found = store.server.ask(lambda pipe: [pipe.time(), pipe.hgetall(client.WATCHERS)])
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
            *([pipe.hdel(client.WATCHERS, *gone)] if gone else []),
            pipe.hset(client.WATCHERS, name, json.dumps(said)),
            pipe.pexpire(client.WATCHERS, FRESH),
            *(pipe.hincrby(client.SILENCES, tag, count) for tag, count in counted.items()),
        ]
    )
    report.latest_ms = 0
    report.unsent.clear()


def silences(store: Store) -> dict[str, int]:
    """By tag, how many were handed in since the store was last empty."""
    (found,) = store.server.ask(lambda pipe: [pipe.hgetall(client.SILENCES)])
    return {text(tag): int(count) for tag, count in sorted(found.items())}


def watchers(store: Store) -> list[WatcherState]:
    """Those that were alive within the last minute."""
    (seconds, _), found = store.server.ask(lambda pipe: [pipe.time(), pipe.hgetall(client.WATCHERS)])
    states = []
    for name, said in found.items():
        told: dict[str, Any] = json.loads(said)
        at = told.pop("at")
        if seconds * 1000 - at < FRESH:
            states.append(WatcherState(text(name), instant(at), **told))
    return sorted(states, key=lambda state: state.name)


@dataclass(frozen=True, slots=True)
class TagCount:
    """Chats of a tag. Those of tags without a policy of their own are counted under `default`, which holds for them."""

    tag: str
    armed: int
    paused: int


@dataclass(frozen=True, slots=True)
class Overview:
    """Live is a chat whose silence is waited for (armed), or that our own side keeps waiting (paused). One that has
    been silent, and has had its last message, is not live until somebody speaks."""

    tags: list[TagCount]
    armed: int
    paused: int
    in_flight: int  #: silences that are claimed and not yet handed in
    lag_ms: int  #: how far the oldest due deadline that nobody has claimed is behind the server's clock
    a_second: float  #: silences, over the last minute
    watchers: list[WatcherState]

    @property
    def live(self) -> int:
        return self.armed + self.paused


def look(store: Store) -> Overview:
    """Raises `StoreAway`."""
    shards, working = store.shards(), watchers(store)
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard.counts)
    tags = {name.partition(":")[2] for name in counts}
    found = [TagCount(tag, counts[f"a:{tag}"], counts[f"p:{tag}"]) for tag in tags]
    return Overview(
        tags=sorted(found, key=lambda each: (-each.armed - each.paused, each.tag)),
        armed=sum(each.armed + each.in_flight for each in shards),
        paused=sum(each.paused for each in shards),
        in_flight=sum(each.in_flight for each in shards),
        lag_ms=max(
            (each.now_ms - each.first_due_ms for each in shards if 0 <= each.first_due_ms < each.now_ms), default=0
        ),
        a_second=sum(each.last_minute for each in working) / 60,
        watchers=working,
    )


#: Reasons for which the silence of a session is not waited for (a typing agent only postpones its deadline).
_PAUSING = ("tool", "transfer", "queue")
_FIELDS = ("u", "c", "a", "d", "j", "t", "p", "x", "f", "v", "n", "y")  #: as in the header of `lua/note_activity.lua`


@dataclass(frozen=True, slots=True)
class Glance:
    now: datetime  #: the server's
    user_id: str
    chat_id: str
    armed_at: int  #: µs; 0 for a session that is not known
    deadline: datetime | None  #: None while it is not armed
    nudges: int  #: guide messages that went out since the user's last word
    tag: str
    policy: str  #: the tag whose policy holds
    pause: str  #: why it is paused, "" where it is not
    closed: bool
    silent: bool  #: noticed, and nobody has spoken since
    last_user_at: datetime | None  #: pings do not count
    last_agent_at: datetime | None

    @property
    def state(self) -> str:
        """`closed`, `paused`, `silent`, `armed`, or `idle`: its user has not written yet."""
        if self.closed:
            return "closed"
        if self.pause in _PAUSING:
            return "paused"
        if self.silent:
            return "silent"
        return "armed" if self.deadline else "idle"


def at(store: Store, session_id: str) -> Glance:
    """Raises `StoreAway`."""
    shard = client.shard_of(session_id)
    time, held, body = store.server.ask(
        lambda pipe: [
            pipe.time(),
            pipe.hmget(client.SESSION[shard] + session_id, *_FIELDS),
            pipe.hget(client.POLICIES[shard], "body"),
        ]
    )
    user_id, chat_id, armed_at, deadline, nudges, tag, pause, closed, user_at, agent_at, rung, claimed = (
        text(each) if each else "" for each in held
    )
    due = int(deadline or 0)
    known = json.loads(body)["tags"] if body else {}
    return Glance(
        now=instant(time[0] * 1000 + time[1] // 1000),
        user_id=user_id,
        chat_id=chat_id,
        armed_at=int(armed_at or 0),
        deadline=instant(due) if due else None,
        nudges=int(nudges or 0),
        tag=tag,
        policy=tag if tag in known else DEFAULT_TAG,
        pause=pause,
        closed=bool(closed),
        silent=bool(claimed) or (not due and int(rung or 0) > 0),
        last_user_at=instant(int(user_at)) if user_at else None,
        last_agent_at=instant(int(agent_at)) if agent_at else None,
    )
