"""The live sessions. Every decision is the server's, by its own clock, in one script a shard; what is many goes in one
pipeline. Raises `StoreAway` where the server does not answer; then nobody knows what has been done, and to do it again
is safe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from django.conf import settings

from sessions import keys, scripts
from sessions.frames import USER, Frame
from sessions.policy_set import PolicySet
from sessions.server import Call, NoPolicies, Server

KEPT = timedelta(hours=24)  #: a session that was never closed vanishes so long after its last frame
CLOSED_KEPT = timedelta(hours=1)  #: longer than a frame may be late
TYPING_PAUSE = timedelta(minutes=2)  #: an agent who began to type and went away does not pause for ever
ACTIVITY_EVERY = timedelta(hours=1)
DROPPED, COUNTED, IDLE = 0, 1, 2


class Noted(NamedTuple):
    """What a frame did: COUNTED, DROPPED (its seq is not above the last) or IDLE (a ping that changes nothing)."""

    outcome: int
    deadline_ms: int  #: when the session will have been silent too long; 0 while it is not armed


@dataclass(frozen=True, slots=True)
class Claim:
    """A silence that is ours until its lease ends."""

    session_id: str
    user_id: str
    chat_id: str
    tag: str
    armed_at: int  #: µs; with the session's id it names the silence
    deadline_ms: int
    nudge: int

    @property
    def deadline(self) -> datetime:
        return instant(self.deadline_ms)


@dataclass(frozen=True, slots=True)
class Claims:
    silences: list[Claim]
    now_ms: int
    next_ms: int  #: when the next one falls due, -1 for never
    versions: frozenset[str]  #: of the policies that the shards hold; "" for none

    @property
    def seconds_to_next(self) -> float:
        """Infinite where nothing is armed."""
        return float("inf") if self.next_ms < 0 else (self.next_ms - self.now_ms) / 1000


class Store:
    """`policies` are asked where the server has lost its own. `clock_offset` (µs) moves the server's clock in tests."""

    def __init__(self, server: Server, policies: Callable[[], PolicySet], *, clock_offset: int = 0) -> None:
        self.server = server
        self.policies = policies
        self.clock_offset = clock_offset

    # --- frames come in -------------------------------------------------------------------------------------------

    def note_activity(self, frames: Sequence[Frame]) -> list[Noted]:
        """Count frames, those of one session in their order, and remember where their users are."""
        groups = _by_shard([frame.session_id for frame in frames])
        answers = self._run([_frames(shard, [frames[each] for each in numbers]) for shard, numbers in groups.items()])
        noted = [Noted(IDLE, 0)] * len(frames)
        for numbers, answer in zip(groups.values(), answers, strict=True):
            for place, number in enumerate(numbers):
                noted[number] = Noted(answer[2 * place], answer[2 * place + 1])
        self._note_presence(
            {
                frame.user_id: frame.session_id
                for frame, each in zip(frames, noted, strict=True)
                if each.outcome == COUNTED and frame.sender == USER and frame.kind != "close"
            }
        )
        return noted

    def close(self, session_id: str, user_id: str) -> Noted:
        """Disarm and forget. What comes late does not open it again, unless the user writes."""
        return self.note_activity([Frame(session_id, user_id, kind="close")])[0]

    def _note_presence(self, sessions: dict[str, str]) -> None:
        """Where each user is. When they were there follows from how long the key still has to live."""
        if sessions:
            window = _ms(settings.AFTERTOUCH_CONVERSATION_WINDOW)
            names = [(_presence(user_id), session_id) for user_id, session_id in sessions.items()]
            self.server.ask(lambda pipe: [pipe.set(name, session_id, px=window) for name, session_id in names])

    def note_expired(self, users: Sequence[tuple[str, str]], *, window: timedelta, tag: str = "") -> int:
        """Keys of a gateway expired, (user id, key): these users are silent now. How many nobody had noted yet."""
        calls: list[Call] = []
        for user_id, key in users:
            shard = keys.shard_of(user_id)
            words = [_ms(KEPT), user_id, user_id, tag, key, _ms(window)]
            calls.append((scripts.NOTE_EXPIRED, [keys.DUE[shard], keys.SESSION[shard] + user_id], words))
        return sum(self._run(calls))

    # --- silences go out ------------------------------------------------------------------------------------------

    def claim_silent(self, limit: int, lease: timedelta, shards: Iterable[int] = range(keys.SHARDS)) -> Claims:
        """Take what is silent by now: of each shard at most `limit`, the oldest first."""
        names = [(keys.DUE[each], keys.INFLIGHT[each], keys.POLICIES[each], keys.SESSION[each]) for each in shards]
        answers = self._run([(scripts.CLAIM_SILENT, each, (limit, _ms(lease))) for each in names])
        return Claims(
            silences=[_claim(row) for answer in answers for row in answer[3:]],
            now_ms=max(answer[0] for answer in answers),
            next_ms=min((answer[2] for answer in answers if answer[2] >= 0), default=-1),
            versions=frozenset(_text(answer[1]) for answer in answers),
        )

    def confirm(self, silences: Sequence[Claim]) -> int:
        """They are handed in. How many nobody had ended meanwhile."""
        calls: list[Call] = []
        for shard, group in _grouped(silences):
            names = [keys.DUE[shard], keys.INFLIGHT[shard], keys.POLICIES[shard]]
            calls.append((scripts.CONFIRM, names + _sessions(shard, group), [_ms(KEPT), *_names_of(group)]))
        return sum(self._run(calls))

    def release(self, silences: Sequence[Claim]) -> int:
        """Give claims back, for anybody to take at once. How many nobody had ended meanwhile."""
        calls: list[Call] = []
        for shard, group in _grouped(silences):
            names = [keys.DUE[shard], keys.INFLIGHT[shard]]
            calls.append((scripts.RELEASE, names + _sessions(shard, group), _names_of(group)))
        return sum(self._run(calls))

    # --- questions ------------------------------------------------------------------------------------------------

    def still_silent(self, silences: Sequence[tuple[str, int]]) -> tuple[datetime, list[bool | str]]:
        """The server's time, and for each (session id, armed at) whether it stands. A text instead is the gateway's
        key that knows: the silence stands until it is there again."""
        groups = _by_shard([session_id for session_id, _ in silences])
        answers = self._run(
            [
                (
                    scripts.STILL_SILENT,
                    [keys.SESSION[shard] + silences[each][0] for each in numbers],
                    [silences[each][1] for each in numbers],
                )
                for shard, numbers in groups.items()
            ]
        )
        stand: list[bool | str] = [True] * len(silences)
        for numbers, answer in zip(groups.values(), answers, strict=True):
            for number, each in zip(numbers, answer[1:], strict=True):
                stand[number] = bool(each) if isinstance(each, int) else _text(each)
        return instant(max((answer[0] for answer in answers), default=0)), stand

    def last_frames(self, user_ids: Sequence[str]) -> list[datetime | None]:
        """When each user was last heard of, None for longer ago than the conversation window."""
        found = self.server.ask(lambda pipe: [pipe.time(), *(pipe.pttl(_presence(user_id)) for user_id in user_ids)])
        seconds, micros = found[0]
        written_by = seconds * 1000 + micros // 1000 - _ms(settings.AFTERTOUCH_CONVERSATION_WINDOW)
        return [instant(written_by + left) if left >= 0 else None for left in found[1:]]

    def sessions_of(self, user_ids: Sequence[str]) -> list[str | None]:
        """The session in which each user was last heard of."""
        found = self.server.ask(lambda pipe: [pipe.get(_presence(user_id)) for user_id in user_ids])
        return [None if each is None else _text(each) for each in found]

    def active_users(self, limit: int) -> dict[int, dict[str, datetime]]:
        """By shard, customers whose activity is to be noted, about `limit` in all, those first that wait longest."""
        share = -(-limit // keys.SHARDS)
        found = self.server.ask(lambda pipe: [pipe.zrange(key, 0, share - 1, withscores=True) for key in keys.ACTIVE])
        return {
            shard: {_text(user_id): instant(int(ms)) for user_id, ms in users}
            for shard, users in enumerate(found)
            if users
        }

    def forget_active(self, users: Mapping[int, Iterable[str]]) -> None:
        """These are noted."""
        self.server.ask(lambda pipe: [pipe.zrem(keys.ACTIVE[shard], *group) for shard, group in users.items()])

    # --- policies -------------------------------------------------------------------------------------------------

    def versions(self) -> set[str]:
        """Of the policies in the shards; "" for none."""
        found = self.server.ask(lambda pipe: [pipe.hget(key, "version") for key in keys.POLICIES])
        return {_text(each or b"") for each in found}

    def push(self, policies: PolicySet) -> None:
        """They hold from the next arming on; deadlines that are set stay."""
        words = ["version", policies.version, "body", policies.body]
        self.server.ask(lambda pipe: [pipe.hset(name, items=words) for name in keys.POLICIES])

    def _run(self, calls: Sequence[Call]) -> list[Any]:
        if not calls:
            return []
        try:
            return self.server.run(calls, self.clock_offset)
        except NoPolicies as lack:
            self.push(self.policies())
            anew = self.server.run([calls[number] for number in lack.undone], self.clock_offset)
            for number, answer in zip(lack.undone, anew, strict=True):
                lack.answers[number] = answer
            return lack.answers


def live() -> Store:
    """The store of this process, on the server that the settings name."""
    return _on(settings.REDIS_URL)


@cache
def _on(url: str) -> Store:
    from sessions import policies

    return Store(Server(url), policies.current)


def instant(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _claim(row: Sequence[Any]) -> Claim:
    session_id, user_id, chat_id, tag = map(_text, row[:4])
    return Claim(session_id, user_id, chat_id, tag, *row[4:])


def _frames(shard: int, frames: Sequence[Frame]) -> Call:
    names = [keys.DUE[shard], keys.INFLIGHT[shard], keys.POLICIES[shard], keys.ACTIVE[shard]]
    words: list[Any] = [_ms(KEPT), _ms(CLOSED_KEPT), _ms(TYPING_PAUSE), _ms(ACTIVITY_EVERY)]
    prefix = keys.SESSION[shard]
    for frame in frames:
        names.append(prefix + frame.session_id)
        words += (
            frame.session_id, frame.user_id, frame.chat_id, "u" if frame.sender == USER else "a", frame.kind,
            "" if frame.seq is None else frame.seq, frame.tag,
        )  # fmt: skip
    return scripts.NOTE_ACTIVITY, names, words


def _by_shard(session_ids: Sequence[str]) -> dict[int, list[int]]:
    """The places of the sessions in the list, by shard, in their order."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, session_id in enumerate(session_ids):
        groups[keys.shard_of(session_id)].append(number)
    return groups


def _grouped(silences: Sequence[Claim]) -> list[tuple[int, list[Claim]]]:
    groups = _by_shard([each.session_id for each in silences])
    return [(shard, [silences[number] for number in numbers]) for shard, numbers in groups.items()]


def _sessions(shard: int, silences: Sequence[Claim]) -> list[str]:
    return [keys.SESSION[shard] + each.session_id for each in silences]


def _names_of(silences: Sequence[Claim]) -> list[Any]:
    return [word for each in silences for word in (each.session_id, each.armed_at)]


def _presence(user_id: str) -> str:
    return keys.PRESENCE[keys.shard_of(user_id)] + user_id


def _ms(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _text(raw: bytes) -> str:
    return raw.decode()
