"""Keep the state of each watcher in Redis for one minute, and the number of recorded silences by policy. Read the state
of single sessions. Export and erase the live session of a customer.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings

from scheduling.ledger.anonymization import Identity
from sessions.policy import AGENT, ANY, CUSTOMER, DEFAULT_KEY, select_policies
from sessions.rates import Recent
from sessions.store import client, inbox
from sessions.store.client import decode_text, instant_of_ms, presence_key, session_key
from sessions.store.sessions import REFUSED, ClaimedSilence, Store, live_store

REPORT_LIFETIME_MS = 60_000  #: ms


class WatcherReport:
    """Counts since the start, and the largest lateness since the last `send_report`."""

    def __init__(self) -> None:
        self.handed_in = 0
        self.latest_ms = 0  #: largest time from deadline to claim
        self.recent = Recent()
        self.unsent: Counter[str] = Counter()  #: by policy

    def count(self, silences: Sequence[ClaimedSilence], now_ms: int) -> None:
        if not silences:
            return
        self.handed_in += len(silences)
        self.recent.add(len(silences))
        self.unsent.update(each.policy for each in silences)
        self.latest_ms = max([self.latest_ms, *(now_ms - each.deadline_ms for each in silences)])


@dataclass(frozen=True, slots=True)
class WatcherState:
    name: str  #: node and process
    seen_at: datetime
    handed_in: int  #: silences since it was started
    latest_ms: int  #: largest lateness of a claim since the previous report
    waits: bool  #: stopped claiming, because too many touches are undelivered
    last_minute: int = 0  #: silences


def send_report(store: Store, report: WatcherReport, *, waits: bool) -> None:
    """Write the watcher's report and remove expired reports.

    A restarted watcher has a new name, so old reports must be removed.
    """
    name = f"{settings.AFTERTOUCH_NODE}:{os.getpid()}"
    (seconds, micros), found = store.server.ask(lambda pipe: [pipe.time(), pipe.hgetall(client.WATCHERS)])
    now_ms = seconds * 1000 + micros // 1000
    gone = [each for each, words in found.items() if now_ms - json.loads(words)["at"] >= REPORT_LIFETIME_MS]
    stored = {
        "at": now_ms, "handed_in": report.handed_in, "latest_ms": report.latest_ms,
        "last_minute": report.recent.total(), "waits": waits,
    }  # fmt: skip
    store.server.ask(
        lambda pipe: [
            *([pipe.hdel(client.WATCHERS, *gone)] if gone else []),
            pipe.hset(client.WATCHERS, name, json.dumps(stored)),
            pipe.pexpire(client.WATCHERS, REPORT_LIFETIME_MS),
            *(pipe.hincrby(client.SILENCES, policy, count) for policy, count in report.unsent.items()),
        ]
    )
    report.latest_ms = 0
    report.unsent.clear()


def count_recorded_silences(store: Store) -> dict[str, int]:
    """Return the number of recorded silences by policy since the store was last empty."""
    (found,) = store.server.ask(lambda pipe: [pipe.hgetall(client.SILENCES)])
    return {decode_text(policy): int(count) for policy, count in sorted(found.items())}


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
class PolicyCount:
    """Number of chats by policy."""

    policy: str
    armed: int
    paused: int


@dataclass(frozen=True, slots=True)
class Overview:
    """Counts of live chats. A chat is live while its timer runs or while it is paused.

    A chat whose last guide message was sent is not live until a participant writes.
    """

    policies: list[PolicyCount]
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
    keys = {name.partition(":")[2] for name in counts}
    found = [PolicyCount(key, counts[f"a:{key}"], counts[f"p:{key}"]) for key in keys]
    return Overview(
        policies=sorted(found, key=lambda each: (-each.armed - each.paused, each.policy)),
        armed=sum(each.armed + each.in_flight for each in shards),
        paused=sum(each.paused for each in shards),
        in_flight=sum(each.in_flight for each in shards),
        lag_ms=max(
            (each.now_ms - each.first_due_ms for each in shards if 0 <= each.first_due_ms < each.now_ms), default=0
        ),
        a_second=sum(each.last_minute for each in working) / 60,
        watchers=working,
    )


DAYS = 7  #: whose counts are read; they are kept for one more
OUTCOMES = ("sent", "answered", "false")  #: counts of guide messages
#: Upper ends of counted pauses, s (see `lua/note_activity.lua`); longer ones are counted after the last.
PAUSE_ENDS = (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1800)


def read_week(store: Store) -> dict[str, Counter[str]]:
    """Return what was counted of each policy within `DAYS`, today included. Raises `StoreUnavailable`.

    `sent`: guide messages. `answered`: those that the customer answered within ten minutes. `false`: those
    without need, because the customer wrote or typed within two seconds, or was typing. A number: the customers' pauses
    at this place of `PAUSE_ENDS`, from 1. A loss of Redis loses the counts.
    """
    names = [name for day in range(DAYS) for name in client.day_keys(day)]
    week: dict[str, Counter[str]] = {}
    for found in store.server.ask(lambda pipe: [pipe.hgetall(name) for name in names]):
        for field, count in found.items():
            what, _, policy = decode_text(field).partition(":")
            week.setdefault(policy, Counter())[what] += int(count)
    return week


#: Reasons that stop the timer. Typing of an agent only postpones the deadline.
_WAITING = "3"
#: Field `i` of a session (see `lua/prelude.lua`), as a reason for a timer that does not run.
_WRITERS = {"0": "unknown_writer", "1": "customer_wrote", "2": "agent_wrote", _WAITING: "customer_wrote"}
_PAUSE_KINDS = ("tool", "transfer", "queue")
#: See the header of `lua/note_activity.lua`.
_FIELDS = ("u", "c", "a", "d", "h", "t", "p", "x", "f", "v", "n", "y", "i")


class PolicyChoice(NamedTuple):
    """A policy of a session, and the session's tags that chose it; none: the default policy."""

    key: str
    tags: tuple[str, ...]
    after: str
    is_open: bool = True  #: time counts now


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    session_id: str
    now: datetime  #: time of the server
    user_id: str
    chat_id: str
    armed_at: int  #: µs; 0 for an unknown session
    deadline: datetime | None  #: None without a timer
    nudges: int  #: guide messages sent since the user's last message
    tags: tuple[str, ...]
    guide: PolicyChoice | None  #: the policy that waits for the customer
    answer: PolicyChoice | None  #: the policy that waits for an agent
    pause: str  #: reason of the pause; "" without one
    closed: bool
    silent: bool  #: silence detected, no message since
    last_user_at: datetime | None  #: pings do not count
    last_agent_at: datetime | None
    writer: str = ""  #: of the last message, once the user has written: a key of `_WRITERS`

    @property
    def policy(self) -> PolicyChoice:
        """Return the policy of the running timer, or of the next one if an agent writes."""
        chosen = self.answer if self.writer == _WAITING else None
        return chosen or self.guide or self.answer or PolicyChoice(DEFAULT_KEY, (), ANY)

    @property
    def state(self) -> str:
        """Return `closed`, `paused`, `silent`, `armed` or `idle` (no timer)."""
        if self.closed:
            return "closed"
        if self.pause in _PAUSE_KINDS and self.policy.after != CUSTOMER:
            return "paused"
        if self.silent:
            return "silent"
        return "armed" if self.deadline else "idle"

    @property
    def awaited(self) -> str:
        """Return whose message ends the timer or the silence: `customer` or `agent`; "" without one."""
        if self.state not in ("armed", "silent"):
            return ""
        return AGENT if self.writer == _WAITING else CUSTOMER

    @property
    def why(self) -> str:
        """Return why the timer runs or not: the state, or for an `idle` session what is missing."""
        if self.state == "armed" and not self.policy.is_open:
            return "outside_hours"
        if self.state != "idle":
            return self.pause if self.state == "paused" else self.state
        if not self.writer:
            return "no_message"
        found = _WRITERS[self.writer]
        missing = "agent_wrote" if not self.guide else "customer_wrote" if self.guide.after == AGENT else ""
        # With an answer policy the next frame starts its timer.
        starts = found == "customer_wrote" and self.answer
        return found if not starts and found in (missing, "unknown_writer") else "policy_changed"


def session_snapshot(store: Store, session_id: str) -> SessionSnapshot:
    """Read one session. Raises `StoreUnavailable`."""
    return session_snapshots(store, [session_id])[0]


def session_snapshots(store: Store, session_ids: Sequence[str]) -> list[SessionSnapshot]:
    """Read sessions. Raises `StoreUnavailable`."""
    time, body, *found = store.server.ask(
        lambda pipe: [
            pipe.time(),
            pipe.hget(client.POLICIES[0], "body"),
            *(pipe.hmget(session_key(each), *_FIELDS) for each in session_ids),
        ]
    )
    now = instant_of_ms(time[0] * 1000 + time[1] // 1000)
    policies = json.loads(body)["policies"] if body else ()
    return [_snapshot(each, now, policies, held) for each, held in zip(session_ids, found, strict=True)]


#: The sets that list the sessions of a state. A silent session is in flight, or has had its last guide message.
_STATE_SETS = {
    "armed": (client.DUE,), "paused": (client.PAUSED,), "idle": (client.IDLE,),
    "silent": (client.INFLIGHT, client.IDLE),
}  # fmt: skip
_EVERY_SET = (client.INFLIGHT, client.DUE, client.PAUSED, client.IDLE)


def list_live_sessions(store: Store, most: int, state: str = "") -> list[SessionSnapshot]:
    """Return claimed sessions, then those whose timer ends first, paused ones, and those that lost their timer last.

    The cost depends on `most` only. With `state` all are read from the sets of that state; others may be among them. A
    shard lists its latest 256 sessions without a timer. Raises `StoreUnavailable`.
    """
    sets = _STATE_SETS.get(state, _EVERY_SET)
    found = store.server.ask(
        lambda pipe: [
            pipe.zrange(key, 0, most - 1, desc=keys is client.IDLE, withscores=True) for keys in sets for key in keys
        ]
    )
    ids: dict[str, None] = {}
    for number, keys in enumerate(sets):
        group = chain(*found[number * client.SHARDS : (number + 1) * client.SHARDS])
        ordered = sorted(group, key=lambda each: (each[1], each[0]), reverse=keys is client.IDLE)
        ids |= dict.fromkeys(decode_text(name) for name, _ in ordered)
    return session_snapshots(store, list(ids)[:most])


def _snapshot(
    session_id: str, now: datetime, policies: Sequence[Mapping[str, Any]], held: Sequence[Any]
) -> SessionSnapshot:
    user_id, chat_id, armed_at, deadline, counted, tags, pause, closed, user_at, agent_at, rung, claimed, writer = (
        decode_text(each) if each else "" for each in held
    )
    due = int(deadline or 0)
    own = tuple(tags.split("\n")) if tags else ()
    guide, answer = select_policies(policies, own)
    return SessionSnapshot(
        session_id=session_id,
        now=now,
        user_id=user_id,
        chat_id=chat_id,
        armed_at=int(armed_at or 0),
        deadline=instant_of_ms(due) if due else None,
        nudges=counted.count("\n"),
        tags=own,
        guide=_policy_choice(guide, now),
        answer=_policy_choice(answer, now),
        pause=pause,
        closed=bool(closed),
        silent=bool(claimed) or (not due and int(rung or 0) > 0),
        last_user_at=instant_of_ms(int(user_at)) if user_at else None,
        last_agent_at=instant_of_ms(int(agent_at)) if agent_at else None,
        writer=writer,
    )


def _policy_choice(policy: Mapping[str, Any] | None, now: datetime) -> PolicyChoice | None:
    if policy is None:
        return None
    hours = [instant_of_ms(each) for each in policy["hours"]]
    spans = zip(hours[::2], hours[1::2], strict=True)
    is_open = not hours or now >= hours[-1] or any(begins <= now < ends for begins, ends in spans)
    return PolicyChoice(policy["key"], tuple(policy["tags"]), policy["after"], is_open)


def export_chats(who: Identity, delivery_keys: Sequence[UUID], most: int) -> list[dict[str, Any]] | None:
    """Return the session of the customer's last frame with its messages, for JSON. None: Redis does not answer."""
    store = live_store()
    try:
        (session_id,) = store.sessions_of([who.user_id])
        if not session_id:
            return []
        found = session_snapshot(store, session_id)
        if found.user_id not in ("", who.user_id):
            return []  # it was closed, and another user opened it
        entries = [each for each in store.messages_since(session_id, inbox.START) if not each.is_of_other(who.user_id)]
    except client.StoreUnavailable:
        return None
    return [
        {
            "session_id": session_id, "chat_id": found.chat_id, "state": found.state, "tags": found.tags,
            "last_user_at": found.last_user_at, "last_agent_at": found.last_agent_at,
            "messages": [{"at": inbox.stored_at(each.cursor), **json.loads(each.body)} for each in entries],
        }
    ]  # fmt: skip


def erase_sessions(who: Identity) -> int:
    """Close and delete the session of the user's last frame, its messages and the user's presence. Idempotent.

    A session that another user has opened since stays, without the messages of its former user. Redis deletes earlier
    sessions and their messages at most `SESSION_LIFETIME` after their last frame. A list of the sessions of each user
    would cost memory for each session.
    Return the number of sessions.
    """
    user_id, store = who.user_id, live_store()
    (session_id,) = store.sessions_of([user_id])
    count = 0
    if session_id and store.close(session_id, user_id).outcome == REFUSED:
        store.delete_messages_of(session_id, user_id)
    elif session_id:
        store.delete_messages(session_id)
        store.server.ask(lambda pipe: [pipe.delete(session_key(session_id))])
        count = 1
    # A user's activity lies in the shards of the sessions. `clear_active` would leave out those of an unavailable node.
    store.server.ask(
        lambda pipe: [*(pipe.zrem(key, user_id) for key in client.ACTIVE), pipe.delete(presence_key(user_id))]
    )
    return count
