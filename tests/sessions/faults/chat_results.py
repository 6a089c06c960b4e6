"""Results of a chat load: messages received, and one end for each silence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sessions.store import client
from sessions.store.inbox import parse_cursor
from tests.sessions.faults.chat_stack import THRESHOLD, ChatStack
from tests.sessions.faults.chat_users import ChatUser, ChatUsers


@dataclass(frozen=True)
class Silence:
    """A recorded silence, with one row for each touch and attempt of it."""

    session: str
    armed_at: int
    deadline_ms: int
    touches: list[tuple[Any, ...]]  #: key, state, reason, started at, outcome

    @property
    def state(self) -> str:
        return f"{self.touches[0][1]} {self.touches[0][2]}".strip() if self.touches else "nothing"

    def problems(self) -> Iterator[str]:
        delivered = [row for row in self.touches if row[4] == "delivered"]
        ends = {row[1] for row in self.touches}
        if len({row[0] for row in self.touches}) != 1:
            yield f"{len(self.touches)} touches"
        elif ends == {"delivered"}:
            if len(delivered) != 1:
                yield f"delivered {len(delivered)} times"
            if min(_ms(row[3]) for row in delivered) < self.deadline_ms:
                yield "early"
        elif not (ends == {"suppressed"} and self.touches[0][2] and not delivered):
            yield f"ended as {self.state}"
        if abs(self.deadline_ms - self.armed_at // 1000 - THRESHOLD * 1000) > 1:
            yield f"due {self.deadline_ms - self.armed_at // 1000} ms after it was armed"


@dataclass
class Count:
    target: ChatStack
    chat_users: ChatUsers
    in_order: bool = True  #: no message is repeated, so all are there in the order of sending
    silences: list[Silence] = field(default_factory=list)
    words: int = 0
    lost: int = 0  #: acknowledged and not in the inbox any more

    def problems(self) -> list[str]:
        self.silences = _silences(self.target, self.chat_users)
        self.words = self.lost = 0
        found = [f"{each.session}:{each.armed_at} {what}" for each in self.silences for what in each.problems()]
        by_session: dict[str, list[Silence]] = defaultdict(list)
        for each in self.silences:
            by_session[each.session].append(each)
        store = self.target.store()
        for user, agent in self.chat_users.chats:
            session = user.client.session
            kept = [entry.cursor for entry in store.messages_since(session, "0-0")]
            last = store.server.ask(lambda pipe, name=session: [pipe.hget(_key(name), "s")])[0]
            found += [
                f"{session} {what}"
                for what in (
                    *self._heard(user, agent, kept),
                    *_guides(by_session[session], user.heard),
                    *_last(by_session[session], last),
                )
            ]
        store.server.client.close()
        return found

    def _heard(self, user: ChatUser, agent: ChatUser, kept: list[str]) -> Iterator[str]:
        """Both sides received each message once; the inbox has the last ones."""
        heard = [frame["cursor"] for frame in user.heard]
        if heard != [frame["cursor"] for frame in agent.heard]:
            yield f"user heard {heard}, agent {[frame['cursor'] for frame in agent.heard]}"
        if heard[-len(kept) :] != kept or heard != sorted(heard, key=parse_cursor):
            yield f"user heard {heard}, and the inbox has {kept}"
        for person in (user, agent):
            if person.problem:
                yield person.problem
            mine = [frame["id"] for frame in user.heard if frame["from"] == person.role]
            self.words += len(person.said)
            self.lost += len(set(person.acknowledged) - set(mine))
            if self.in_order and mine != person.said:
                yield f"{person.role} said {person.said}, and {mine} is there"
            if len(mine) != len(set(mine)):
                yield f"{person.role}: {mine} has something twice"

    def line(self, name: str, seed: int, *notes: str) -> str:
        states = Counter(each.state for each in self.silences)
        ends = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
        told = f"{len(self.chat_users.chats)} chats, {self.words} messages, {len(self.silences)} silences: {ends}"
        lost = [f"{self.lost} acknowledged messages lost"] if self.lost else []
        return " · ".join([name, f"seed {seed}", told, *lost, *notes])


def _guides(silences: list[Silence], heard: list[dict[str, Any]]) -> Iterator[str]:
    """In the chat is what was delivered, each once and none before its time."""
    guides = [frame for frame in heard if frame["from"] == "system"]
    wanted = {str(each.touches[0][0]): each for each in silences if each.state == "delivered"}
    if sorted(wanted) != sorted(frame["id"] for frame in guides):
        yield f"has the guide messages {guides}, and these were delivered: {sorted(wanted)}"
    for frame in guides:
        came_at = parse_cursor(frame["cursor"])[0]
        if frame["id"] in wanted and came_at < wanted[frame["id"]].deadline_ms:
            yield f"has a guide message {wanted[frame['id']].deadline_ms - came_at} ms before its time"


def _last(silences: list[Silence], handed_in: bytes | None) -> Iterator[str]:
    """No message follows the last one, so its silence remains."""
    last = max(silences, key=lambda each: each.armed_at, default=None)
    if handed_in is None or last is None or last.armed_at != int(handed_in):
        yield f"fell silent at the end, and {last} was the last that was handed in ({handed_in!r})"
    elif last.state != "delivered":
        yield f"got no guide message at the end: {last}"


def _silences(target: ChatStack, chat_users: ChatUsers) -> list[Silence]:
    found: dict[str, Silence] = {}
    for event_id, occurred_at, *touch in target.sql(_TOUCHES, [f"{chat_users.prefix}%"]):
        session, _, armed_at = event_id.rpartition(":")
        silence = found.setdefault(event_id, Silence(session, int(armed_at), _ms(occurred_at), []))
        if touch[0]:
            silence.touches.append(tuple(touch))
    return list(found.values())


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def _key(session: str) -> str:
    return client.SESSION[client.shard_of(session)] + session


_TOUCHES = """
SELECT e.event_id, e.occurred_at, t.root_id, t.state, t.reason, a.started_at, a.outcome
FROM scheduling_event AS e LEFT JOIN scheduling_touch AS t ON t.event_id = e.id
LEFT JOIN LATERAL touch_attempts(t.attempts) AS a ON true
WHERE e.type = 'session.silent' AND e.event_id LIKE %s
"""
