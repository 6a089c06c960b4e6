"""Keep the live sessions and their messages in Redis.

Every decision is made in one Lua script per shard, by the server's clock. The header of each Lua file defines the order
of keys and arguments. Calls for several shards share a pipeline.
Raises `StoreUnavailable` where the server does not answer; the calls may then have run or not, and repeating them is
safe.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from django.conf import settings

from sessions.frames import KINDS, USER, Frame
from sessions.policy import LONGEST_WAIT, PolicySet
from sessions.rates import Every
from sessions.store import client, inbox
from sessions.store.client import (
    NO_POLICIES,
    Call,
    Server,
    StoreUnavailable,
    by_shard,
    decode_text,
    inbox_keys,
    instant_of_ms,
    presence_key,
    session_key,
    to_milliseconds,
)
from sessions.store.inbox import MAX_MESSAGES, START, Entry, Post, Posted

#: After its last frame, an unclosed session is deleted, and the presence of its user, so that an export and an erasure
#: find the session. `AFTERTOUCH_CONVERSATION_WINDOW` is not longer.
SESSION_LIFETIME = timedelta(hours=24)
CLOSED_KEPT = timedelta(hours=1)  #: longer than a frame may be late
TYPING_PAUSE = timedelta(minutes=2)  #: an agent who types but never sends does not pause a session for longer
RENEWED_EVERY = timedelta(hours=1)
#: After the last frame; shorter than `SESSION_LIFETIME`, so the session still exists.
PAUSE_COUNTS = SESSION_LIFETIME - 2 * RENEWED_EVERY
TYPED_LATELY = timedelta(seconds=10)  #: after a typing frame without a message, the user still counts as typing

REARMED, REARM_SPREAD = 200, timedelta(seconds=10)  #: sessions per shard and batch, about
DROPPED, COUNTED, IDLE, REFUSED, UNAVAILABLE = 0, 1, 2, 3, 4
OUTCOMES = {COUNTED: "counted", DROPPED: "dropped", IDLE: "idle"}  #: names of those that are no error
UNREACHABLE = "unreachable"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
REMEMBERED_EVERY = 30.0  #: seconds for which a process may use older policies


class FrameEffect(NamedTuple):
    """The effect of a frame.

    COUNTED; DROPPED: its seq is not above the last, or its message is a duplicate. IDLE: it changes nothing (a
    ping, or an agent's frame in a closed session). REFUSED: the session belongs to another user. UNAVAILABLE: its node
    of a cluster does not answer.
    """

    outcome: int
    deadline_ms: int  #: when the timer ends; 0 without a timer
    posted: Posted | None = None  #: what became of its message
    last_cursor: str = ""  #: of the inbox, where it was requested (see `FrameRequest`)


class ShardCounts(NamedTuple):
    """Counts of one shard."""

    now_ms: int
    armed: int
    in_flight: int  #: claimed and not yet confirmed
    paused: int  #: by a tool, a transfer or a queue
    first_due_ms: int  #: -1: no deadline
    counts: dict[str, int]  #: sessions with a timer or in flight as a:<policy>, paused sessions as p:<policy>


class ExpiredKey(NamedTuple):
    """A key of a gateway that expired `age` ago."""

    user_id: str
    key: str
    age: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True)
class ClaimedSilence:
    """A silence that this watcher has claimed until its lease ends."""

    session_id: str
    user_id: str
    chat_id: str
    tags: tuple[str, ...]
    policy: str  #: key
    policy_version: int
    armed_at: int  #: µs; identifies the silence together with the session id
    deadline_ms: int
    nudge: int
    for_agent: int = 0  #: 1: the customer waits for an agent

    @property
    def tag(self) -> str:
        """Return all tags in one text."""
        return ",".join(self.tags)

    @property
    def armed(self) -> datetime:
        return instant_of_ms(self.armed_at // 1000)

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
        policies: read when the server has lost its policies. Raises `StoreUnavailable` if they cannot be read.
        clock_offset: µs added to the server's clock, for tests.
    """

    def __init__(self, server: Server, policies: Callable[[], PolicySet], *, clock_offset: int = 0) -> None:
        self.server = server
        self.policies = policies
        self.clock_offset = clock_offset
        self._known: dict[str, str] = {}  #: version and body of the policies that the server last held
        self._remembering = Every(REMEMBERED_EVERY)

    # --- incoming frames ------------------------------------------------------------------------------------------

    def note_activity(
        self,
        frames: Sequence[Frame],
        posts: Mapping[int, Post] = MappingProxyType({}),
        *,
        partly: bool = False,
    ) -> list[FrameEffect]:
        """Count frames, store their messages and the presence of their users. Frames of one session keep their order.

        A message is stored if and only if its frame is neither dropped nor refused. A dropped frame stores presence
        too, as of the user's last activity. It may repeat a frame that was counted before the write of its presence
        failed.

        Args:
            posts: the messages by position of their frame.
            partly: return `UNAVAILABLE` for frames of an unavailable node of a cluster, unless no node answers.
        """
        self._remember_policies()
        session_ids = [frame.session_id for frame in frames]
        groups = by_shard(session_ids)
        words: list[tuple[Any, ...]] = []
        for number, frame in enumerate(frames):
            flags = frame.first_tag + 2 * frame.spoken + 4 * (number in posts)
            code = f"{frame.sender[0]}{flags}{frame.kind}"
            words.append((code, frame.user_id, frame.chat_id, frame.seq_in_epoch, frame.joined_tags))
        for number, post in posts.items():
            words[number] += post.key, post.body()
        keys = (
            client.DUE, client.INFLIGHT, client.POLICIES, client.ACTIVE, client.PAUSED, client.COUNTS,
            client.day_keys(), client.IDLE,
        )  # fmt: skip
        spans = (SESSION_LIFETIME, CLOSED_KEPT, TYPING_PAUSE, RENEWED_EVERY)
        first = [*map(to_milliseconds, spans), len(client.SESSION[0]), *inbox.LIMITS]
        wanted = _calls_of_sessions(
            "note_activity", session_ids, groups, words, keys=keys, first=first, with_inbox=posts
        )
        answers = self._run(wanted, partly=partly)
        noted = [FrameEffect(UNAVAILABLE, 0)] * len(frames)
        dropped: dict[int, int] = {}  #: last activity of the user, ms, by position
        for numbers, answer in zip(groups.values(), answers, strict=True):
            if answer is None:
                continue
            size, carrying = 2 * len(numbers), [number for number in numbers if number in posts] if posts else ()
            for number, outcome, deadline in zip(numbers, answer[:size:2], answer[1:size:2], strict=True):
                if outcome <= DROPPED:
                    dropped[number], outcome = -outcome, DROPPED
                noted[number] = FrameEffect(outcome, deadline)
            for number, posted in zip(carrying, answer[size:], strict=True):
                noted[number] = noted[number]._replace(posted=_parse_posted(posted))
        counted = [(frame, at.deadline_ms) for frame, at in zip(frames, noted, strict=True) if at.outcome == COUNTED]
        repeats = [(frames[number], at, noted[number].deadline_ms) for number, at in dropped.items()]
        present, wrote = _collect_presence(counted, repeats)
        lost = self.store_presence(present, wrote, partly=partly)
        if lost:
            # A counted message must stop touches of its user. The client repeats the frame.
            for number, frame in enumerate(frames):
                if frame.user_id in present and presence_key(frame.user_id) in lost:
                    noted[number] = FrameEffect(UNAVAILABLE, 0)
        return noted

    def store_presence(
        self, present: Mapping[str, tuple[str, int]], wrote: Mapping[str, int | str], *, partly: bool
    ) -> set[str]:
        """Store the session of each user's last frame, and when users last wrote.

        Args:
            present: the session of each user's last frame and its deadline, ms, by user id.
            wrote: for each user 1 if they wrote a message, else the word of their repeats (see note_presence.lua).

        Returns:
            The keys that could not be written, with `partly`.
        """
        now = int(time.time() * 1000)
        far = now + to_milliseconds(LONGEST_WAIT)
        hour_ms, lifetime = to_milliseconds(timedelta(hours=1)), to_milliseconds(SESSION_LIFETIME)
        groups: dict[tuple[int, int], list[str]] = defaultdict(list)
        for user_id, (_, deadline) in present.items():
            # Closed hours keep some sessions longer (see `lua/prelude.lua`).
            hours = 0 if deadline <= far else (deadline - now) // hour_ms + 1
            groups[client.shard_of(user_id), lifetime + hours * hour_ms].append(user_id)
        wanted: list[Call] = [
            (
                "note_presence",
                [client.PRESENCE[shard] + each for each in users],
                [kept, *(word for each in users for word in (present[each][0], wrote[each]))],
            )
            for (shard, kept), users in groups.items()
        ]
        answers = self._run_available(wanted) if partly else self._run(wanted)
        return {key for (_, keys, _), answer in zip(wanted, answers, strict=True) if answer is None for key in keys}

    def close(self, session_id: str, user_id: str) -> FrameEffect:
        """Stop the timer and delete the session's state. Later frames do not reopen it, unless the user writes."""
        return self.note_activity([Frame(session_id, user_id, kind="close")])[0]

    def note_expired(self, expired: Sequence[ExpiredKey], *, window: timedelta, tag: str = "") -> int:
        """Record the silence of users whose gateway keys expired. Idempotent within `window`.

        A silence counts from the expiry. Returns the number of silences that were new.
        """
        wanted: list[Call] = []
        for user_id, key, age in expired:
            shard = client.shard_of(user_id)
            names = [client.DUE[shard], client.POLICIES[shard], client.COUNTS[shard], session_key(user_id)]
            words = [to_milliseconds(SESSION_LIFETIME), user_id, user_id, tag, key]
            words += map(to_milliseconds, (window, age))
            wanted.append(("note_expired", names, words))
        return sum(self._run(wanted))

    # --- inboxes --------------------------------------------------------------------------------------------------

    def put_messages(self, posts: Sequence[Post]) -> list[Posted]:
        """Store messages that are no frames, those of one session in their order. Idempotent for messages with a key.

        The outcome for a message of a cluster's node that is unavailable is `unavailable`, unless all are.
        """
        wanted: list[Call] = [
            (
                "inbox_put",
                [session_key(post.session_id), *inbox_keys(post.session_id)],
                [*inbox.LIMITS, post.key, post.body(), post.user_id, int(post.sender not in KINDS)],
            )
            for post in posts
        ]
        return [_parse_posted(answer) for answer in self._run(wanted, partly=True)]

    def messages_since(self, session_id: str, cursor: str, most: int = MAX_MESSAGES) -> list[Entry]:
        """Return the messages after the cursor, oldest first. Messages above the limits are missing."""
        (found,) = self.server.ask(lambda pipe: [pipe.xrange(inbox_keys(session_id)[0], f"({cursor}", "+", count=most)])
        return [
            Entry(number.decode(), fields[b"m"].decode(), decode_text(fields.get(b"u", ""))) for number, fields in found
        ]

    def last_cursors(self, session_ids: Sequence[str]) -> list[str]:
        """Return "" for each session of a cluster's node that is unavailable, unless all are."""
        if not session_ids:
            return []
        found = self.server.ask(
            lambda pipe: [pipe.xrevrange(inbox_keys(each)[0], count=1) for each in session_ids], partly=True
        )
        return ["" if entries is None else entries[0][0].decode() if entries else START for entries in found]

    def read_cursor_and_owner(self, session_id: str) -> tuple[str, str]:
        """Return the last cursor and the user who owns the session, "" without one."""
        name = session_key(session_id)
        entries, owner = self.server.ask(
            lambda pipe: [pipe.xrevrange(inbox_keys(session_id)[0], count=1), pipe.hget(name, "u")]
        )
        return entries[0][0].decode() if entries else START, decode_text(owner or "")

    def delete_messages(self, session_id: str) -> None:
        self.server.ask(lambda pipe: [pipe.delete(*inbox_keys(session_id))])

    def delete_messages_of(self, session_id: str, user_id: str) -> None:
        """Delete the messages from the time when this user had the session. Those of its next user stay."""
        cursors = [entry.cursor for entry in self.messages_since(session_id, START) if entry.owner == user_id]
        if cursors:
            self.server.ask(lambda pipe: [pipe.xdel(inbox_keys(session_id)[0], *cursors)])

    # --- silences -------------------------------------------------------------------------------------------------

    def claim_silent(
        self, limit: int, lease: timedelta, shards: Iterable[int] = range(client.SHARDS)
    ) -> ClaimedSilences:
        """Claim sessions whose deadline has passed, at most `limit` per shard, oldest first.

        Leaves out the shards of a cluster's node that is unavailable.
        """
        shards = list(shards)
        looks: list[Call] = [
            ("peek_silent", (client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard]), (limit,))
            for shard in shards
        ]
        answers = dict(zip(shards, self._run(looks, partly=True), strict=True))
        self._remember_policies()
        due = [decode_text(each) for answer in answers.values() if answer for each in answer[3:]]
        groups = by_shard(due)
        keys, spans = (client.DUE, client.INFLIGHT, client.POLICIES), (lease, SESSION_LIFETIME)
        words, first = [(each,) for each in due], [*map(to_milliseconds, spans)]
        wanted = _calls_of_sessions("claim_silent", due, groups, words, keys=keys, first=first)
        answers |= zip(groups, self._run_available(wanted), strict=True)
        found = [answer for answer in answers.values() if answer]
        if not found:
            raise StoreUnavailable("no node answers")
        now_ms = max(answer[0] for answer in found)
        # Each shard's next deadline by its own clock.
        waits = [max(answer[2] - answer[0], 0) for answer in found if answer[2] >= 0]
        return ClaimedSilences(
            silences=[_parse_claim(*row) for answer in found for row in answer[3:]],
            now_ms=now_ms,
            next_ms=now_ms + min(waits) if waits else -1,
            versions=frozenset(decode_text(answer[1]) for answer in found),
        )

    def confirm(self, silences: Sequence[ClaimedSilence]) -> int:
        """Mark claims as recorded. Idempotent. Returns how many were still in flight under the same arming.

        Those of a cluster's node that is unavailable are claimed again after their lease.
        """
        keys = (client.DUE, client.INFLIGHT, client.POLICIES, client.COUNTS, client.IDLE)
        wanted = _calls_of_claims("confirm", silences, keys, first=[to_milliseconds(SESSION_LIFETIME)])
        return sum(each or 0 for each in self._run(wanted, partly=True))

    def rearm_for_campaign(self, limit: int = REARMED) -> int:
        """Give a batch of sessions per shard, armed before the first batch of the active campaign, its threshold.

        A campaign that was saved after its start, or whose threshold was edited, is applied like one that starts.

        Timers that end within a second stay, and waits for an agent. Deadlines that would have passed already are
        spread over `REARM_SPREAD`. Returns the number of batches; 0: all are done. Concurrent calls apply each batch
        once. Leaves out the shards of a cluster's node that is unavailable.
        """
        looks: list[Call] = [("find_armed", names, (limit,)) for names in zip(client.DUE, client.POLICIES, strict=True)]
        spans = [to_milliseconds(REARM_SPREAD), to_milliseconds(SESSION_LIFETIME)]
        wanted: list[Call] = []
        for shard, answer in enumerate(self._run(looks, partly=True)):
            if answer:
                # The campaign's start, threshold and cutoff, and two cursors.
                words = [decode_text(each) for each in answer]
                batch, session_ids = words[:5], words[5:]
                names = [
                    client.DUE[shard],
                    client.POLICIES[shard],
                    *(client.SESSION[shard] + each for each in session_ids),
                ]
                wanted.append(("rearm", names, [*batch, *spans, *session_ids]))
        return sum(each is not None for each in self._run_available(wanted))

    def release(self, silences: Sequence[ClaimedSilence]) -> int:
        """Return claims before their lease ends. Idempotent. Returns how many were still in flight under the same
        arming.
        """
        wanted = _calls_of_claims("release", silences, (client.DUE, client.INFLIGHT))
        return sum(each or 0 for each in self._run(wanted, partly=True))

    # --- queries --------------------------------------------------------------------------------------------------

    def still_silent(
        self, silences: Sequence[tuple[str, int]], *, send_until: Sequence[datetime | None] = ()
    ) -> tuple[datetime, list[bool | str | None]]:
        """Return the server's time and, for each (session id, armed at), whether the silence still holds.

        A text instead of a bool is the key of a gateway: the silence holds until that key exists again. None: the node
        of a cluster is unavailable.

        Args:
            send_until: for each silence, the latest time at which its guide message is sent after this call.
                A silence that holds is then reserved until `note_sending`. None or no list: no message is sent now.
        """
        session_ids = [session_id for session_id, _ in silences]
        groups = by_shard(session_ids)
        words = [
            (armed_at, 0 if until is None else to_milliseconds(until - _EPOCH))
            for (_, armed_at), until in zip(silences, send_until or [None] * len(silences), strict=True)
        ]
        answers = self._run(_calls_of_sessions("still_silent", session_ids, groups, words), partly=True)
        stand: list[bool | str | None] = [None] * len(silences)
        for numbers, answer in zip(groups.values(), answers, strict=True):
            for number, each in zip(numbers, answer[1:] if answer else [], strict=bool(answer)):
                stand[number] = bool(each) if isinstance(each, int) else decode_text(each)
        return instant_of_ms(max((answer[0] for answer in answers if answer), default=0)), stand

    def note_sending(self, silences: Sequence[tuple[str, int]], sent: Sequence[bool]) -> None:
        """Count the guide messages that are sent now and release the reservations of the others. Idempotent.

        Without this call a reservation limits the guide messages of its session until the user writes or types. It
        counts as sent only then.
        """
        session_ids = [session_id for session_id, _ in silences]
        words = [(armed_at, int(is_sent)) for (_, armed_at), is_sent in zip(silences, sent, strict=True)]
        wanted = _calls_of_sessions(
            "note_sending", session_ids, by_shard(session_ids), words,
            keys=(client.day_keys(), client.POLICIES), first=[to_milliseconds(TYPED_LATELY)],
        )  # fmt: skip
        self._run(wanted, partly=True)

    def last_frames(self, user_ids: Sequence[str]) -> list[datetime | str | None]:
        """Return when each user last wrote a message, None outside the conversation window.

        Pings and typing do not count, because a page that stays open sends them too. `UNREACHABLE` replaces the time of
        a user of a cluster's node that is unavailable.
        """
        groups = by_shard(user_ids)
        window = to_milliseconds(settings.AFTERTOUCH_CONVERSATION_WINDOW)
        wanted: list[Call] = [
            ("last_messages", [client.PRESENCE[shard] + user_ids[at] for at in group], [window])
            for shard, group in groups.items()
        ]
        heard: list[datetime | str | None] = [UNREACHABLE] * len(user_ids)
        answers = self._run(wanted, partly=True)
        for group, answer in zip(groups.values(), answers, strict=True):
            for at, ms in zip(group, answer or (), strict=bool(answer)):
                heard[at] = instant_of_ms(ms) if ms else None
        return heard

    def sessions_of(self, user_ids: Sequence[str], *, within: timedelta | None = None) -> list[str | None]:
        """Return the session of each user's last frame, pings included. Most users have none: "".

        None: the user's node of a cluster is unavailable, unless all are.

        Args:
            within: the age of the last frame from which it does not count; None: it counts as long as its session is
                kept. A session that closed hours keep longer counts longer.
        """
        # GET has the same answer for a missing key as an unavailable node.
        found = self.server.ask(
            lambda pipe: [command(presence_key(each)) for each in user_ids for command in (pipe.mget, pipe.pttl)],
            partly=True,
        )
        return [
            None
            if values is None or left_ms is None
            else decode_text(values[0][6:])
            if values[0] and (within is None or timedelta(milliseconds=left_ms) > SESSION_LIFETIME - within)
            else ""
            for values, left_ms in zip(found[::2], found[1::2], strict=True)
        ]

    def known(self, session_ids: Sequence[str]) -> list[bool]:
        """Return whether each session still has state in the store."""
        found = self.server.ask(lambda pipe: [pipe.exists(session_key(each)) for each in session_ids])
        return [bool(each) for each in found]

    def active_users(self, limit: int) -> dict[int, dict[str, datetime]]:
        """Return customers whose activity is not yet stored in PostgreSQL, by shard.

        Returns about `limit` customers, the longest waiting first. Leaves out the shards of a cluster's node that is
        unavailable.
        """
        share = -(-limit // client.SHARDS)
        found = self.server.ask(
            lambda pipe: [pipe.zrange(key, 0, share - 1, withscores=True) for key in client.ACTIVE], partly=True
        )
        return {
            shard: {decode_text(user_id): instant_of_ms(int(ms)) for user_id, ms in users}
            for shard, users in enumerate(found)
            if users
        }

    def clear_active(self, users: Mapping[int, Iterable[str]]) -> None:
        """Remove customers whose activity is stored in PostgreSQL. Those of an unavailable node are stored again."""
        self.server.ask(
            lambda pipe: [pipe.zrem(client.ACTIVE[shard], *group) for shard, group in users.items()], partly=True
        )

    def shards(self, *, partly: bool = False) -> list[ShardCounts]:
        """Return the counts of each shard. The cost does not depend on the number of sessions.

        First removes pauses older than `PAUSE_COUNTS`, at most 100 per shard.

        Args:
            partly: leave out the shards of a cluster's node that is unavailable, unless no node answers.
        """
        sets = zip(client.DUE, client.INFLIGHT, client.PAUSED, client.COUNTS, strict=True)
        wanted: list[Call] = [("tally", names, [to_milliseconds(PAUSE_COUNTS)]) for names in sets]
        answers = self._run(wanted, partly=partly)
        over = [decode_text(each) for answer in answers if answer for each in answer[5]]
        if over:
            words = [(each,) for each in over]
            keys, first = (client.PAUSED, client.COUNTS), [to_milliseconds(PAUSE_COUNTS)]
            self._run_available(
                _calls_of_sessions("delete_pauses", over, by_shard(over), words, keys=keys, first=first)
            )
            answers = self._run(wanted, partly=partly)
        return [
            ShardCounts(
                now_ms,
                armed,
                in_flight,
                paused,
                first,
                dict(zip(map(decode_text, counts[::2]), counts[1::2], strict=True)),
            )
            for now_ms, armed, in_flight, paused, first, _, *counts in filter(None, answers)
        ]

    # --- policies -------------------------------------------------------------------------------------------------

    def push(self, policies: PolicySet) -> None:
        """Store the policies. They apply from the next arming; deadlines already set do not change.

        A cluster's node that is unavailable gets them from the next watcher or frame that finds it without them.
        """
        self._push({"version": policies.version, "body": policies.body})

    def _push(self, words: dict[str, str]) -> None:
        flat = [part for item in words.items() for part in item]
        self.server.ask(lambda pipe: [pipe.hset(name, items=flat) for name in client.POLICIES], partly=True)
        self._known = words

    def _remember_policies(self) -> None:
        if self._remembering.is_due():
            names = ("version", "body")
            with suppress(StoreUnavailable):
                found = self.server.ask(lambda pipe: [pipe.hmget(key, names) for key in client.POLICIES], partly=True)
                held = next((each for each in found if each and all(each)), None)
                if held:
                    self._known = dict(zip(names, map(decode_text, held), strict=True))

    def _run(self, wanted: Sequence[Call], *, partly: bool = False) -> list[Any]:
        """Return the answers in order. For `partly` see `Server.run`.

        Restores policies that the server has lost. Without the database, these are those that it last held.

        Raises:
            StoreUnavailable: a session must not get a timer from an unknown policy.
        """
        if not wanted:
            return []
        answers = self.server.run(wanted, self.clock_offset, partly=partly)
        undone = [number for number, answer in enumerate(answers) if answer is NO_POLICIES]
        if not undone:
            return answers
        try:
            policies = self.policies()
        except StoreUnavailable:
            if not self._known:
                raise
            self._push(self._known)
        else:
            self.push(policies)
        try:
            anew = self.server.run([wanted[number] for number in undone], self.clock_offset, partly=partly)
        except StoreUnavailable:
            if not partly:
                raise
            anew = [None] * len(undone)
        for number, answer in zip(undone, anew, strict=True):
            # The node was unavailable for the push, or lost them since.
            if answer is NO_POLICIES and not partly:
                raise StoreUnavailable("a node has no silence policies")
            answers[number] = None if answer is NO_POLICIES else answer
        return answers

    def _run_available(self, wanted: Sequence[Call]) -> list[Any]:
        """Return None for each call of an unavailable node, also if all are unavailable."""
        try:
            return self._run(wanted, partly=True)
        except StoreUnavailable:
            return [None] * len(wanted)


def live_store() -> Store:
    """Return the store of this process, on the server of `AFTERTOUCH_SESSIONS_REDIS_URL`, by default `REDIS_URL`."""
    return _store_of_url(settings.AFTERTOUCH_SESSIONS_REDIS_URL or settings.REDIS_URL)


@cache
def _store_of_url(url: str) -> Store:
    from sessions.detection import policies

    return Store(Server(url), policies.current_policies)


def _calls_of_sessions(
    script: str,
    session_ids: Sequence[str],
    groups: Mapping[int, Sequence[int]],
    words: Sequence[Sequence[Any]],
    *,
    keys: Sequence[Sequence[str]] = (),
    first: Sequence[Any] = (),
    with_inbox: Container[int] = (),
) -> list[Call]:
    """Build one call per shard: `keys` of the shard and those of its sessions, then `first` and the sessions' `words`.

    `groups` maps each shard to positions in `session_ids` and `words`. The sessions at `with_inbox` have the keys of
    their inbox too.
    """
    made: list[Call] = []
    for shard, numbers in groups.items():
        names = [each[shard] for each in keys]
        for number in numbers:
            names.append(client.SESSION[shard] + session_ids[number])
            if number in with_inbox:
                names += inbox_keys(session_ids[number])
        made.append((script, names, [*first, *(word for number in numbers for word in words[number])]))
    return made


def _calls_of_claims(
    script: str, silences: Sequence[ClaimedSilence], keys: Sequence[Sequence[str]], *, first: Sequence[Any] = ()
) -> list[Call]:
    session_ids = [each.session_id for each in silences]
    words = [(each.session_id, each.armed_at) for each in silences]
    return _calls_of_sessions(script, session_ids, by_shard(session_ids), words, keys=keys, first=first)


def _collect_presence(
    counted: Sequence[tuple[Frame, int]], dropped: Sequence[tuple[Frame, int, int]]
) -> tuple[dict[str, tuple[str, int]], dict[str, int | str]]:
    """Return the arguments of `store_presence` for counted frames and for dropped ones, which may be repeats.

    Args:
        counted: frames, each with the deadline of its session, ms.
        dropped: frames, each with the last activity of its session's user and the session's deadline, ms.
    """
    present: dict[str, tuple[str, int]] = {}
    wrote: dict[str, int | str] = {}
    for frame, deadline in counted:
        if frame.sender == USER and frame.kind != "close":
            present[frame.user_id] = frame.session_id, deadline
            wrote[frame.user_id] = wrote.get(frame.user_id, 0) or int(frame.kind == "message")
    known = set(present) if dropped else ()
    # Only a message counts as writing. The time of its session may be that of a later frame: then a touch waits longer.
    repeats = [
        (at if frame.kind == "message" else 0, frame, deadline)
        for frame, at, deadline in dropped
        if frame.sender == USER and frame.kind != "close"
    ]
    for at, frame, deadline in sorted(repeats, key=lambda each: each[0]):
        if frame.user_id not in known:
            present[frame.user_id] = frame.session_id, deadline
            wrote[frame.user_id] = f"@{at}"
        elif wrote[frame.user_id] != 1:
            wrote[frame.user_id] = at
    return present, wrote


def _parse_claim(
    session_id: bytes, user_id: bytes, chat_id: bytes, tags: bytes, policy: bytes, *numbers: int
) -> ClaimedSilence:
    words = tuple(decode_text(tags).split("\n")) if tags else ()
    return ClaimedSilence(
        decode_text(session_id), decode_text(user_id), decode_text(chat_id), words, decode_text(policy), *numbers
    )


def _parse_posted(answer: Sequence[bytes] | None) -> Posted:
    return Posted(*(word.decode() for word in answer)) if answer else Posted("unavailable")
