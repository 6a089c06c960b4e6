"""Keep the live sessions in Redis.

Every decision is made in one Lua script per shard, by the server's clock. Calls for several shards share a pipeline.
Raises `StoreUnavailable` where the server does not answer; the calls may then have run or not, and repeating them is
safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from django.conf import settings

from sessions.frames import USER, Frame
from sessions.policy import PoliciesUnknown, PolicySet
from sessions.rates import Every
from sessions.store import calls, client
from sessions.store.client import Call, NoPolicies, Server, StoreUnavailable, decode_text

DROPPED, COUNTED, IDLE, REFUSED = 0, 1, 2, 3
REMEMBERED_EVERY = 30.0  #: seconds for which a process may use older policies


class FrameEffect(NamedTuple):
    """The effect of a frame.

    COUNTED; DROPPED: its seq is not above the last. IDLE: it changes nothing (a ping, or an agent's frame in a closed
    session). REFUSED: the session belongs to another user.
    """

    outcome: int
    deadline_ms: int  #: when the timer ends; 0 without a timer


class ShardCounts(NamedTuple):
    """Counts of one shard."""

    now_ms: int
    armed: int
    in_flight: int  #: claimed and not yet confirmed
    paused: int  #: by a tool, a transfer or a queue
    first_due_ms: int  #: -1: no deadline
    counts: dict[str, int]  #: sessions with a timer or in flight as a:<tag>, paused sessions as p:<tag>


@dataclass(frozen=True, slots=True)
class ClaimedSilence:
    """A silence that this watcher has claimed until its lease ends."""

    session_id: str
    user_id: str
    chat_id: str
    tag: str
    armed_at: int  #: µs; identifies the silence together with the session id
    deadline_ms: int
    nudge: int

    @property
    def deadline(self) -> datetime:
        return instant_of_ms(self.deadline_ms)


@dataclass(frozen=True, slots=True)
class ClaimedSilences:
    silences: list[ClaimedSilence]
    now_ms: int
    next_ms: int  #: next deadline; -1: none
    versions: frozenset[str]  #: of the policies of the shards; "" where a shard has none

    @property
    def seconds_to_next(self) -> float:
        """Return the seconds to the next deadline, infinite without one."""
        return float("inf") if self.next_ms < 0 else (self.next_ms - self.now_ms) / 1000


class Store:
    """Access to the live sessions of one server.

    Args:
        policies: read when the server has lost its policies.
        clock_offset: µs added to the server's clock, for tests.
    """

    def __init__(self, server: Server, policies: Callable[[], PolicySet], *, clock_offset: int = 0) -> None:
        self.server = server
        self.policies = policies
        self.clock_offset = clock_offset
        self._known: dict[str, str] = {}  #: version and body of the policies that the server last held
        self._remembering = Every(REMEMBERED_EVERY)

    # --- incoming frames ------------------------------------------------------------------------------------------

    def note_activity(self, frames: Sequence[Frame]) -> list[FrameEffect]:
        """Count frames and store the presence of their users. Frames of one session keep their order."""
        self._remember_policies()
        groups = calls.by_shard([frame.session_id for frame in frames])
        answers = self._run(calls.note_activity(frames, groups))
        noted = [FrameEffect(IDLE, 0)] * len(frames)
        for numbers, answer in zip(groups.values(), answers, strict=True):
            for number, outcome, deadline in zip(numbers, answer[::2], answer[1::2], strict=True):
                noted[number] = FrameEffect(outcome, deadline)
        present, wrote = {}, set()
        for frame, each in zip(frames, noted, strict=True):
            if each.outcome == COUNTED and frame.sender == USER and frame.kind != "close":
                present[frame.user_id] = frame.session_id
                if frame.kind == "message":
                    wrote.add(frame.user_id)
        self._run(calls.note_presence(present, wrote))
        return noted

    def close(self, session_id: str, user_id: str) -> FrameEffect:
        """Stop the timer and delete the session's state. Later frames do not reopen it, unless the user writes."""
        return self.note_activity([Frame(session_id, user_id, kind="close")])[0]

    def note_expired(self, users: Sequence[tuple[str, str]], *, window: timedelta, tag: str = "") -> int:
        """Record the silence of users whose gateway keys expired. Idempotent within `window`.

        `users` are pairs of user id and key. Returns the number of silences that were new.
        """
        return sum(self._run([calls.note_expired(user_id, key, tag, window) for user_id, key in users]))

    # --- silences -------------------------------------------------------------------------------------------------

    def claim_silent(
        self, limit: int, lease: timedelta, shards: Iterable[int] = range(client.SHARDS)
    ) -> ClaimedSilences:
        """Claim sessions whose deadline has passed, at most `limit` per shard, oldest first."""
        self._remember_policies()
        shards = list(shards)
        answers = self._run([calls.peek_silent(shard, limit) for shard in shards])
        found = [number for number, answer in enumerate(answers) if len(answer) > 3]
        wanted = [
            calls.claim_silent(shards[at], [decode_text(each) for each in answers[at][3:]], lease) for at in found
        ]
        for number, answer in zip(found, self._run(wanted), strict=True):
            answers[number] = answer
        return ClaimedSilences(
            silences=[_parse_claim(*row) for answer in answers for row in answer[3:]],
            now_ms=max(answer[0] for answer in answers),
            next_ms=min((answer[2] for answer in answers if answer[2] >= 0), default=-1),
            versions=frozenset(decode_text(answer[1]) for answer in answers),
        )

    def confirm(self, silences: Sequence[ClaimedSilence]) -> int:
        """Mark claims as recorded. Idempotent. Returns how many were still in flight under the same arming."""
        return sum(self._run(calls.confirm(_silence_ids(silences))))

    def release(self, silences: Sequence[ClaimedSilence]) -> int:
        """Return claims before their lease ends. Idempotent. Returns how many were still in flight under the same
        arming.
        """
        return sum(self._run(calls.release(_silence_ids(silences))))

    # --- queries --------------------------------------------------------------------------------------------------

    def still_silent(
        self, silences: Sequence[tuple[str, int]], *, send_until: Sequence[datetime | None] = ()
    ) -> tuple[datetime, list[bool | str]]:
        """Return the server's time and, for each (session id, armed at), whether the silence still holds.

        A text instead of a bool is the key of a gateway: the silence holds until that key exists again.

        Args:
            send_until: for each silence, the latest time at which its guide message is sent after this call.
                A silence that holds is then reserved until `note_sending`. None or no list: no message is sent now.
        """
        groups = calls.by_shard([session_id for session_id, _ in silences])
        answers = self._run(calls.still_silent(silences, groups, send_until or [None] * len(silences)))
        stand: list[bool | str] = [True] * len(silences)
        for numbers, answer in zip(groups.values(), answers, strict=True):
            for number, each in zip(numbers, answer[1:], strict=True):
                stand[number] = bool(each) if isinstance(each, int) else decode_text(each)
        return instant_of_ms(max((answer[0] for answer in answers), default=0)), stand

    def note_sending(self, silences: Sequence[tuple[str, int]], sent: Sequence[bool]) -> None:
        """Count the guide messages that are sent now and release the reservations of the others. Idempotent.

        Without this call a reservation limits the guide messages of its session until the user writes or types. It
        counts in no statistics.
        """
        self._run(calls.note_sending(silences, sent))

    def last_frames(self, user_ids: Sequence[str]) -> list[datetime | None]:
        """Return when each user last wrote a message, None outside the conversation window.

        Pings and typing do not count, because a page that stays open sends them too.
        """
        groups = calls.by_shard(user_ids)
        heard: list[datetime | None] = [None] * len(user_ids)
        for group, answers in zip(groups.values(), self._run(calls.last_messages(user_ids, groups)), strict=True):
            for at, ms in zip(group, answers, strict=True):
                heard[at] = instant_of_ms(ms) if ms else None
        return heard

    def sessions_of(self, user_ids: Sequence[str]) -> list[str | None]:
        """Return the session of each user's last frame, pings included. Most users have none."""
        values = self.server.ask(lambda pipe: [pipe.get(calls.presence_key(each)) for each in user_ids])
        return [value and decode_text(value[6:]) for value in values]

    def known(self, session_ids: Sequence[str]) -> list[bool]:
        """Return whether each session still has state in the store."""
        names = [client.SESSION[client.shard_of(each)] + each for each in session_ids]
        return [bool(each) for each in self.server.ask(lambda pipe: [pipe.exists(name) for name in names])]

    def active_users(self, limit: int) -> dict[int, dict[str, datetime]]:
        """Return customers whose activity is not yet stored in PostgreSQL, by shard.

        Returns about `limit` customers, the longest waiting first.
        """
        share = -(-limit // client.SHARDS)
        found = self.server.ask(lambda pipe: [pipe.zrange(key, 0, share - 1, withscores=True) for key in client.ACTIVE])
        return {
            shard: {decode_text(user_id): instant_of_ms(int(ms)) for user_id, ms in users}
            for shard, users in enumerate(found)
            if users
        }

    def clear_active(self, users: Mapping[int, Iterable[str]]) -> None:
        """Remove customers whose activity is stored in PostgreSQL."""
        self.server.ask(lambda pipe: [pipe.zrem(client.ACTIVE[shard], *group) for shard, group in users.items()])

    def shards(self) -> list[ShardCounts]:
        """Return the counts of each shard. The cost does not depend on the number of sessions.

        First removes pauses older than `calls.PAUSE_COUNTS`, at most 100 per shard.
        """
        answers = self._run(calls.count_shards())
        over = [(shard, [decode_text(each) for each in answer[5]]) for shard, answer in enumerate(answers) if answer[5]]
        if over:
            self._run([calls.clear_pauses(shard, session_ids) for shard, session_ids in over])
            answers = self._run(calls.count_shards())
        return [
            ShardCounts(
                now_ms,
                armed,
                in_flight,
                paused,
                first,
                dict(zip(map(decode_text, counts[::2]), counts[1::2], strict=True)),
            )
            for now_ms, armed, in_flight, paused, first, _, *counts in answers
        ]

    # --- policies -------------------------------------------------------------------------------------------------

    def push(self, policies: PolicySet) -> None:
        """Store the policies. They apply from the next arming; deadlines already set do not change."""
        self._push({"version": policies.version, "body": policies.body})

    def _push(self, words: dict[str, str]) -> None:
        flat = [part for item in words.items() for part in item]
        self.server.ask(lambda pipe: [pipe.hset(name, items=flat) for name in client.POLICIES])
        self._known = words

    def _push_again(self) -> None:
        """Restore policies that the server has lost.

        Without the database, uses the policies that the server last held.

        Raises:
            StoreAway: this process never read policies. A session must not get a timer from an unknown policy.
        """
        try:
            self.push(self.policies())
        except PoliciesUnknown as error:
            if not self._known:
                raise StoreUnavailable("the silence policies are lost, and the database cannot be reached") from error
            self._push(self._known)

    def _remember_policies(self) -> None:
        if self._remembering.is_due():
            (held,) = self.server.ask(lambda pipe: [pipe.hgetall(client.POLICIES[0])])
            self._known = {decode_text(name): decode_text(value) for name, value in held.items()} or self._known

    def _run(self, wanted: Sequence[Call]) -> list[Any]:
        if not wanted:
            return []
        try:
            return self.server.run(wanted, self.clock_offset)
        except NoPolicies as lack:
            self._push_again()
            anew = self.server.run([wanted[number] for number in lack.undone], self.clock_offset)
            for number, answer in zip(lack.undone, anew, strict=True):
                lack.answers[number] = answer
            return lack.answers


def live_store() -> Store:
    """Return the store of this process on the server of `REDIS_URL`."""
    return _store_of_url(settings.REDIS_URL)


@cache
def _store_of_url(url: str) -> Store:
    from sessions.detection import policies

    return Store(Server(url), policies.current_policies)


def instant_of_ms(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _parse_claim(session_id: bytes, user_id: bytes, chat_id: bytes, tag: bytes, *numbers: int) -> ClaimedSilence:
    return ClaimedSilence(
        decode_text(session_id), decode_text(user_id), decode_text(chat_id), decode_text(tag), *numbers
    )


def _silence_ids(silences: Sequence[ClaimedSilence]) -> list[tuple[str, int]]:
    return [(each.session_id, each.armed_at) for each in silences]
