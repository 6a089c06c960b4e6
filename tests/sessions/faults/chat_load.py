"""Chats under load, and the count of what became of their silences."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sessions.frames import Frame
from sessions.store import client
from sessions.store.client import Server, StoreUnavailable
from sessions.store.sessions import UNAVAILABLE, Store
from tests.sessions.faults.chat_stack import POLICIES, THRESHOLD, ChatStack


@dataclass
class Chat:
    """A user who writes at these moments (by the monotonic clock) and then stays silent."""

    session: str
    moments: list[float]
    sent: int = 0
    doubtful: set[int] = field(default_factory=set)  #: words that may have counted though no answer came


@dataclass
class ChatTraffic:
    """So many new chats a second, in a thread. A frame that is not taken is sent again until it is."""

    redis_url: str
    prefix: str
    rate: float
    chance: random.Random
    chats: list[Chat] = field(default_factory=list)
    keeps_pinging: bool = False  #: every user pings twice a second until `hush`
    refused: int = 0

    def __enter__(self) -> ChatTraffic:
        self._stop, self._hushed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="chatter")
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def stop_talking(self) -> None:
        """Stop new users; present ones write a last message."""
        self._hushed.set()
        self._thread.join()

    def _run(self) -> None:
        store = Store(Server(self.redis_url), lambda: POLICIES)
        began_at = last_ping = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if not self._hushed.is_set():
                while len(self.chats) < (now - began_at) * self.rate:
                    self.chats.append(self._pick_chat(now))
            pinging = self.keeps_pinging and now - last_ping > 0.5
            if pinging:
                last_ping = now
            waiting = [chat for chat in self.chats if self._send_frame(chat, now, pinging)]
            self._send(store, waiting, now)
            if self._hushed.is_set() and not any(chat.sent < len(chat.moments) for chat in self.chats):
                break
            self._stop.wait(0.02)
        store.server.client.close()

    def _pick_chat(self, now: float) -> Chat:
        """Half of them write once more about when they fall silent, before or after."""
        again = [now + THRESHOLD + self.chance.uniform(-0.1, 0.3)] if self.chance.random() < 0.5 else []
        return Chat(f"{self.prefix}{len(self.chats)}", [now, *again])

    def _send_frame(self, chat: Chat, now: float, pinging: bool) -> bool:
        return pinging or (chat.sent < len(chat.moments) and chat.moments[chat.sent] <= now)

    def _send(self, store: Store, chats: list[Chat], now: float) -> None:
        frames = [
            Frame(
                chat.session,
                f"user-{chat.session}",
                kind="message" if self._send_frame(chat, now, False) else "ping",
                spoken=chat.sent > 0,
            )
            for chat in chats
        ]
        try:
            taken = [each.outcome != UNAVAILABLE for each in store.note_activity(frames, partly=True)]
        except StoreUnavailable:
            taken = [False] * len(chats)
        self.refused += not all(taken)
        for chat, is_taken in zip(chats, taken, strict=True):
            if not is_taken:
                chat.doubtful.add(chat.sent)
            elif self._send_frame(chat, now, False):
                chat.sent += 1


@dataclass
class Count:
    """What became of every session's last silence, and of all silences."""

    sessions: int
    events: int
    states: Counter[str]
    problems: list[str]

    def line(self, name: str, seed: int) -> str:
        states = ", ".join(f"{number} {state}" for state, number in sorted(self.states.items()))
        return f"{name} · seed {seed} · {self.sessions} sessions, {self.events} silences: {states}"


def count(target: ChatStack, traffic: ChatTraffic) -> Count:
    rows = target.sql(_TOUCHES, [f"{traffic.prefix}%"])
    by_event: dict[str, list[tuple[Any, ...]]] = {}
    for event_id, *touch in rows:
        by_event.setdefault(event_id, []).append(tuple(touch))
    problems = [f"{event}: {touches}" for event, touches in by_event.items() if not _ends_once(touches)]
    last = list_timer_starts(traffic)
    problems += [
        f"{session} fell silent and nobody noticed"
        for session, armed_at in last.items()
        if f"{session}:{armed_at}" not in by_event
    ]
    per_session = Counter(event.rpartition(":")[0] for event in by_event)
    problems += [
        f"{chat.session} was silent {per_session[chat.session]} times, and wrote {len(chat.moments)} times"
        for chat in traffic.chats
        if per_session[chat.session] > len(chat.moments) + len(chat.doubtful) and not traffic.keeps_pinging
    ]
    states = Counter(f"{touches[0][0]} {touches[0][1]}".strip() for touches in by_event.values())
    return Count(len(last), len(by_event), states, problems)


def list_timer_starts(traffic: ChatTraffic) -> dict[str, int]:
    """When each session was last armed: the name of its last silence."""
    server = Server(traffic.redis_url)
    names = [chat.session for chat in traffic.chats]
    found = server.ask(lambda pipe: [pipe.hget(client.SESSION[client.shard_of(name)] + name, "a") for name in names])
    server.client.close()
    return {name: int(armed_at) for name, armed_at in zip(names, found, strict=True) if armed_at}


def _ends_once(touches: list[tuple[Any, ...]]) -> bool:
    if len(touches) != 1:
        return False
    state, reason, delivered = touches[0]
    return delivered == 1 if state == "delivered" else state == "suppressed" and bool(reason) and not delivered


_TOUCHES = """
SELECT e.event_id, t.state, t.reason,
       (SELECT count(*) FROM touch_attempts(t.attempts) AS a WHERE a.outcome = 'delivered')
FROM scheduling_event AS e LEFT JOIN scheduling_touch AS t ON t.event_id = e.id
WHERE e.type = 'session.silent' AND e.event_id LIKE %s
"""
