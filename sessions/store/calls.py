"""Build the calls of the Lua scripts, and read their answers.

The header of each Lua file defines the order of keys and arguments.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings

from sessions.frames import KINDS, USER, Frame
from sessions.store import client
from sessions.store.client import Call, decode_text

#: After its last frame, an unclosed session is deleted, and the presence of its user, so that an export and an erasure
#: find the session. `AFTERTOUCH_CONVERSATION_WINDOW` is not longer.
SESSION_LIFETIME = timedelta(hours=24)
CLOSED_KEPT = timedelta(hours=1)  #: longer than a frame may be late
TYPING_PAUSE = timedelta(minutes=2)  #: an agent who types but never sends does not pause a session for longer
RENEWED_EVERY = timedelta(hours=1)
PAUSE_COUNTS = (
    SESSION_LIFETIME - 2 * RENEWED_EVERY
)  #: after the last frame; shorter than `SESSION_LIFETIME`, so the session still exists
TYPED_LATELY = timedelta(seconds=10)  #: after a typing frame without a message, the user still counts as typing

#: Side, flags and kind of a frame in one word (see note_activity.lua).
_FRAME_CODES = {
    (sender, kind, first_tag, spoken, stored): f"{sender[0]}{first_tag + 2 * spoken + 4 * stored}{kind}"
    for sender, kinds in KINDS.items()
    for kind in kinds
    for first_tag in (False, True)
    for spoken in (False, True)
    for stored in (False, True)
}
_REPEAT = -1  #: order of a frame that is dropped

LONG_TIMER = timedelta(hours=13)  #: `LONGEST` in `lua/prelude.lua`
_HOUR_MS = 3_600_000

_EPOCH, _MS = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)

Silence = tuple[str, int]  #: session id and the arming whose timer ended


def note_activity(
    frames: Sequence[Frame], groups: Mapping[int, Sequence[int]], stored: Collection[int], repeated: Collection[int]
) -> list[Call]:
    """Build one call per shard. `groups` maps each shard to positions in `frames`.

    Args:
        stored: positions of frames whose message is in the inbox.
        repeated: positions of frames that are dropped, as their message was counted before.
    """
    return [_note_activity(shard, frames, numbers, stored, repeated) for shard, numbers in groups.items()]


def _note_activity(
    shard: int, frames: Sequence[Frame], numbers: Sequence[int], stored: Collection[int], repeated: Collection[int]
) -> Call:
    names = [client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard], client.ACTIVE[shard]]
    names += [client.PAUSED[shard], client.COUNTS[shard], client.SIGNALS[shard]]
    names += [pauses_key(shard, days_ago=0), client.IDLE[shard]]
    prefix = client.SESSION[shard]
    words: list[Any] = [
        to_milliseconds(SESSION_LIFETIME),
        to_milliseconds(CLOSED_KEPT),
        to_milliseconds(TYPING_PAUSE),
        to_milliseconds(RENEWED_EVERY),
        len(prefix),
    ]
    for number in numbers:
        frame = frames[number]
        names.append(prefix + frame.session_id)
        words += (
            _FRAME_CODES[frame.sender, frame.kind, frame.first_tag, frame.spoken, number in stored],
            frame.user_id, frame.chat_id, _REPEAT if number in repeated else order_of(frame.seq, frame.epoch),
            frame.joined_tags,
        )  # fmt: skip
    return client.NOTE_ACTIVITY, names, words


def pauses_key(shard: int, *, days_ago: int) -> str:
    """Return the key of the pauses of a day, by this node's clock."""
    return f"{client.PAUSES[shard]}{int(time.time()) // 86_400 - days_ago}"


def order_of(seq: int | None, epoch: str) -> int | str:
    """Return the order argument of the scripts: empty, `seq` or `seq@epoch`."""
    if seq is None:
        return ""
    return f"{seq}@{epoch}" if epoch else seq


def collect_presence(
    counted: Sequence[tuple[Frame, int]], dropped: Sequence[tuple[Frame, int, int]]
) -> tuple[dict[str, tuple[str, int]], dict[str, int | str]]:
    """Return the arguments of `note_presence` for counted frames and for dropped ones, which may be repeats.

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


def note_presence(sessions: Mapping[str, tuple[str, int]], wrote: Mapping[str, int | str]) -> list[Call]:
    """Build one call per shard and lifetime. Closed hours keep some sessions longer (see `lua/prelude.lua`).

    Args:
        sessions: the session of each user's last frame and its deadline, ms, by user id.
        wrote: for each user 1 if they wrote a message, else the word of their repeats (see note_presence.lua).
    """
    users = list(sessions)
    lifetime, now = to_milliseconds(SESSION_LIFETIME), int(time.time() * 1000)
    far = now + to_milliseconds(LONG_TIMER)
    made: list[Call] = []
    for shard, numbers in by_shard(users).items():
        groups: dict[int, list[str]] = defaultdict(list)
        for number in numbers:
            deadline = sessions[users[number]][1]
            hours = 0 if deadline <= far else (deadline - now) // _HOUR_MS + 1
            groups[lifetime + hours * _HOUR_MS].append(users[number])
        for kept, group in groups.items():
            words = [word for each in group for word in (sessions[each][0], wrote[each])]
            made.append((client.NOTE_PRESENCE, [client.PRESENCE[shard] + each for each in group], [kept, *words]))
    return made


def is_recent(left_ms: int, window: timedelta) -> bool:
    """Return whether the user's last frame is within the window, by the remaining lifetime of the presence.

    A process of an earlier version keeps it for the window only. So it counts in its last minutes too.
    """
    left = left_ms * _MS
    return left <= window or left > SESSION_LIFETIME - window


def last_messages(users: Sequence[str], groups: Mapping[int, Sequence[int]]) -> list[Call]:
    window = to_milliseconds(settings.AFTERTOUCH_CONVERSATION_WINDOW)
    return [
        (client.LAST_MESSAGES, [client.PRESENCE[shard] + users[at] for at in group], [window])
        for shard, group in groups.items()
    ]


def note_expired(user_id: str, key: str, tag: str, window: timedelta) -> Call:
    shard = client.shard_of(user_id)
    words = [to_milliseconds(SESSION_LIFETIME), user_id, user_id, tag, key, to_milliseconds(window)]
    names = [client.DUE[shard], client.POLICIES[shard], client.COUNTS[shard], client.SESSION[shard] + user_id]
    return client.NOTE_EXPIRED, names, words


def peek_silent(shard: int, limit: int) -> Call:
    return client.PEEK_SILENT, (client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard]), (limit,)


def claim_silent(shard: int, session_ids: Sequence[str], lease: timedelta) -> Call:
    names = [client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard]]
    return (
        client.CLAIM_SILENT,
        names + [client.SESSION[shard] + each for each in session_ids],
        (to_milliseconds(lease), to_milliseconds(SESSION_LIFETIME), *session_ids),
    )


def find_armed(shard: int, limit: int) -> Call:
    return client.FIND_ARMED, (client.DUE[shard], client.POLICIES[shard]), (limit,)


def rearm(shard: int, batch: Sequence[str], session_ids: Sequence[str], spread: timedelta) -> Call:
    """Build the call for a batch of `find_armed`: the campaign's start, threshold and cutoff, and two cursors."""
    names = [client.DUE[shard], client.POLICIES[shard], *(client.SESSION[shard] + each for each in session_ids)]
    spans = [to_milliseconds(spread), to_milliseconds(SESSION_LIFETIME)]
    return client.REARM, names, [*batch, *spans, *session_ids]


def confirm(silences: Sequence[Silence]) -> list[Call]:
    names = (client.DUE, client.INFLIGHT, client.POLICIES, client.COUNTS, client.IDLE)
    return [
        (
            client.CONFIRM,
            [*(each[shard] for each in names), *_session_keys(shard, group)],
            [to_milliseconds(SESSION_LIFETIME), *_flatten(group)],
        )
        for shard, group in _grouped(silences)
    ]


def release(silences: Sequence[Silence]) -> list[Call]:
    return [
        (client.RELEASE, [client.DUE[shard], client.INFLIGHT[shard], *_session_keys(shard, group)], _flatten(group))
        for shard, group in _grouped(silences)
    ]


def still_silent(
    silences: Sequence[Silence], groups: Mapping[int, Sequence[int]], send_until: Sequence[datetime | None]
) -> list[Call]:
    asked = [
        (armed_at, 0 if until is None else (until - _EPOCH) // _MS)
        for (_, armed_at), until in zip(silences, send_until, strict=True)
    ]
    return [
        (
            client.STILL_SILENT,
            _session_keys(shard, [silences[number] for number in numbers]),
            [word for number in numbers for word in asked[number]],
        )
        for shard, numbers in groups.items()
    ]


def note_sending(silences: Sequence[Silence], sent: Sequence[bool]) -> list[Call]:
    groups = by_shard([session_id for session_id, _ in silences])
    return [
        (
            client.NOTE_SENDING,
            [client.SIGNALS[shard], *_session_keys(shard, [silences[number] for number in numbers])],
            [
                len(client.SESSION[shard]),
                to_milliseconds(TYPED_LATELY),
                *(word for number in numbers for word in (silences[number][1], int(sent[number]))),
            ],
        )
        for shard, numbers in groups.items()
    ]


def count_shards() -> list[Call]:
    """Build one call per shard."""
    return [
        (
            client.TALLY,
            [client.DUE[shard], client.INFLIGHT[shard], client.PAUSED[shard], client.COUNTS[shard]],
            [to_milliseconds(PAUSE_COUNTS)],
        )
        for shard in range(client.SHARDS)
    ]


def clear_pauses(shard: int, session_ids: Sequence[str]) -> Call:
    names = [client.PAUSED[shard], client.COUNTS[shard], *(client.SESSION[shard] + each for each in session_ids)]
    return client.DELETE_PAUSES, names, [to_milliseconds(PAUSE_COUNTS), *session_ids]


def presence_key(user_id: str) -> str:
    return client.PRESENCE[client.shard_of(user_id)] + user_id


def by_shard(ids: Sequence[str]) -> dict[int, list[int]]:
    """Group positions of the ids by shard. The order within a shard is kept."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(ids):
        groups[client.shard_of(each)].append(number)
    return groups


def to_milliseconds(span: timedelta) -> int:
    return span // _MS


def _grouped(silences: Sequence[Silence]) -> list[tuple[int, list[Silence]]]:
    groups = by_shard([session_id for session_id, _ in silences])
    return [(shard, [silences[number] for number in numbers]) for shard, numbers in groups.items()]


def _session_keys(shard: int, silences: Sequence[Silence]) -> list[str]:
    return [client.SESSION[shard] + session_id for session_id, _ in silences]


def _flatten(silences: Sequence[Silence]) -> list[Any]:
    return [word for silence in silences for word in silence]


class ShardCounts(NamedTuple):
    """Counts of one shard."""

    now_ms: int
    armed: int
    in_flight: int  #: claimed and not yet confirmed
    paused: int  #: by a tool, a transfer or a queue
    first_due_ms: int  #: -1: no deadline
    counts: dict[str, int]  #: sessions with a timer or in flight as a:<policy>, paused sessions as p:<policy>


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


def instant_of_ms(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def parse_claim(
    session_id: bytes, user_id: bytes, chat_id: bytes, tags: bytes, policy: bytes, *numbers: int
) -> ClaimedSilence:
    words = tuple(decode_text(tags).split("\n")) if tags else ()
    return ClaimedSilence(
        decode_text(session_id), decode_text(user_id), decode_text(chat_id), words, decode_text(policy), *numbers
    )
