"""Keep the state of each watcher in Redis for one minute, and the number of recorded silences by tag. Read the state
of single sessions.
"""

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
from sessions.store.client import decode_text
from sessions.store.sessions import ClaimedSilence, Store, instant_of_ms

REPORT_LIFETIME_MS = 60_000  #: ms


class WatcherReport:
    """Counts since the start, and the largest lateness since the last `send_report`."""

    def __init__(self) -> None:
        self.handed_in = 0
        self.latest_ms = 0  #: largest time from deadline to claim
        self.recent = Recent()
        self.unsent: Counter[str] = Counter()  #: by tag

    def count(self, silences: Sequence[ClaimedSilence], now_ms: int) -> None:
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
    latest_ms: int  #: largest lateness of a claim since the previous report
    waits: bool  #: stopped claiming, because too many touches are undelivered
    last_minute: int = 0  #: silences


def send_report(store: Store, report: WatcherReport, tags: Container[str], *, waits: bool) -> None:
    """Write the watcher's report and remove expired reports.

    A tag without a policy counts as the default tag, so the number of names is bounded by the policies. A restarted
    watcher has a new name, so old reports must be removed.
    """
    name = f"{settings.AFTERTOUCH_NODE}:{os.getpid()}"
    (seconds, micros), found = store.server.ask(lambda pipe: [pipe.time(), pipe.hgetall(client.WATCHERS)])
    now_ms = seconds * 1000 + micros // 1000
    gone = [each for each, words in found.items() if now_ms - json.loads(words)["at"] >= REPORT_LIFETIME_MS]
    stored = {
        "at": now_ms, "handed_in": report.handed_in, "latest_ms": report.latest_ms,
        "last_minute": report.recent.total(), "waits": waits,
    }  # fmt: skip
    counted: Counter[str] = Counter()
    for tag, count in report.unsent.items():
        counted[tag if tag in tags else DEFAULT_TAG] += count
    store.server.ask(
        lambda pipe: [
            *([pipe.hdel(client.WATCHERS, *gone)] if gone else []),
            pipe.hset(client.WATCHERS, name, json.dumps(stored)),
            pipe.pexpire(client.WATCHERS, REPORT_LIFETIME_MS),
            *(pipe.hincrby(client.SILENCES, tag, count) for tag, count in counted.items()),
        ]
    )
    report.latest_ms = 0
    report.unsent.clear()


def count_recorded_silences(store: Store) -> dict[str, int]:
    """Return the number of recorded silences by tag since the store was last empty."""
    (found,) = store.server.ask(lambda pipe: [pipe.hgetall(client.SILENCES)])
    return {decode_text(tag): int(count) for tag, count in sorted(found.items())}


def running_watchers(store: Store) -> list[WatcherState]:
    """Return the watchers that reported within the last minute."""
    (seconds, _), found = store.server.ask(lambda pipe: [pipe.time(), pipe.hgetall(client.WATCHERS)])
    states = []
    for name, report in found.items():
        report_fields: dict[str, Any] = json.loads(report)
        at = report_fields.pop("at")
        if seconds * 1000 - at < REPORT_LIFETIME_MS:
            states.append(WatcherState(decode_text(name), instant_of_ms(at), **report_fields))
    return sorted(states, key=lambda state: state.name)


@dataclass(frozen=True, slots=True)
class TagCount:
    """Number of chats by tag. A tag without its own policy counts as `default`."""

    tag: str
    armed: int
    paused: int


@dataclass(frozen=True, slots=True)
class Overview:
    """Counts of live chats. A chat is live while its timer runs or while it is paused.

    A chat whose last guide message was sent is not live until a participant writes.
    """

    tags: list[TagCount]
    armed: int
    paused: int
    in_flight: int  #: claimed silences that are not yet recorded
    lag_ms: int  #: server time minus the oldest due deadline without a claim
    a_second: float  #: silences per second over the last minute
    watchers: list[WatcherState]

    @property
    def live(self) -> int:
        return self.armed + self.paused


def read_overview(store: Store) -> Overview:
    """Collect the overview of all shards and watchers. Raises `StoreUnavailable`."""
    shards, working = store.shards(), running_watchers(store)
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


#: Reasons that stop the timer. Typing of an agent only postpones the deadline.
_PAUSE_KINDS = ("tool", "transfer", "queue")
_FIELDS = ("u", "c", "a", "d", "h", "t", "p", "x", "f", "v", "n", "y")  #: see the header of `lua/note_activity.lua`


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    now: datetime  #: time of the server
    user_id: str
    chat_id: str
    armed_at: int  #: µs; 0 for an unknown session
    deadline: datetime | None  #: None without a timer
    nudges: int  #: guide messages sent since the user's last message
    tag: str
    policy: str  #: the tag whose policy applies
    pause: str  #: reason of the pause; "" without one
    closed: bool
    silent: bool  #: silence detected, no message since
    last_user_at: datetime | None  #: pings do not count
    last_agent_at: datetime | None

    @property
    def state(self) -> str:
        """Return `closed`, `paused`, `silent`, `armed` or `idle` (the user has not written yet)."""
        if self.closed:
            return "closed"
        if self.pause in _PAUSE_KINDS:
            return "paused"
        if self.silent:
            return "silent"
        return "armed" if self.deadline else "idle"


def session_snapshot(store: Store, session_id: str) -> SessionSnapshot:
    """Read one session. Raises `StoreUnavailable`."""
    shard = client.shard_of(session_id)
    time, held, body = store.server.ask(
        lambda pipe: [
            pipe.time(),
            pipe.hmget(client.SESSION[shard] + session_id, *_FIELDS),
            pipe.hget(client.POLICIES[shard], "body"),
        ]
    )
    user_id, chat_id, armed_at, deadline, counted, tag, pause, closed, user_at, agent_at, rung, claimed = (
        decode_text(each) if each else "" for each in held
    )
    due = int(deadline or 0)
    known = json.loads(body)["tags"] if body else {}
    return SessionSnapshot(
        now=instant_of_ms(time[0] * 1000 + time[1] // 1000),
        user_id=user_id,
        chat_id=chat_id,
        armed_at=int(armed_at or 0),
        deadline=instant_of_ms(due) if due else None,
        nudges=counted.count("\n"),
        tag=tag,
        policy=tag if tag in known else DEFAULT_TAG,
        pause=pause,
        closed=bool(closed),
        silent=bool(claimed) or (not due and int(rung or 0) > 0),
        last_user_at=instant_of_ms(int(user_at)) if user_at else None,
        last_agent_at=instant_of_ms(int(agent_at)) if agent_at else None,
    )
