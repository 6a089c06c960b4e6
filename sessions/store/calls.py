"""Build the calls of the Lua scripts. The header of each Lua file defines the order of keys and arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings

from sessions.frames import KINDS, Frame
from sessions.store import client
from sessions.store.client import Call

SESSION_LIFETIME = timedelta(hours=24)  #: after its last frame, an unclosed session is deleted
CLOSED_KEPT = timedelta(hours=1)  #: longer than a frame may be late
TYPING_PAUSE = timedelta(minutes=2)  #: an agent who types but never sends does not pause a session for longer
RENEWED_EVERY = timedelta(hours=1)
PAUSE_COUNTS = (
    SESSION_LIFETIME - 2 * RENEWED_EVERY
)  #: after the last frame; shorter than `SESSION_LIFETIME`, so the session still exists
TYPED_LATELY = timedelta(seconds=10)  #: after a typing frame without a message, the user still counts as typing

#: Side, flags and kind of a frame in one word (see note_activity.lua).
_FRAME_CODES = {
    (sender, kind, first_tag, spoken): f"{sender[0]}{first_tag + 2 * spoken}{kind}"
    for sender, kinds in KINDS.items()
    for kind in kinds
    for first_tag in (False, True)
    for spoken in (False, True)
}

_EPOCH, _MS = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)

Silence = tuple[str, int]  #: session id and the arming whose timer ended


def note_activity(frames: Sequence[Frame], groups: Mapping[int, Sequence[int]]) -> list[Call]:
    """Build one call per shard. `groups` maps each shard to positions in `frames`."""
    return [_note_activity(shard, [frames[number] for number in numbers]) for shard, numbers in groups.items()]


def _note_activity(shard: int, frames: Sequence[Frame]) -> Call:
    names = [client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard], client.ACTIVE[shard]]
    names += [client.PAUSED[shard], client.COUNTS[shard], client.SIGNS[shard]]
    prefix = client.SESSION[shard]
    words: list[Any] = [
        to_milliseconds(SESSION_LIFETIME),
        to_milliseconds(CLOSED_KEPT),
        to_milliseconds(TYPING_PAUSE),
        to_milliseconds(RENEWED_EVERY),
        len(prefix),
    ]
    for frame in frames:
        names.append(prefix + frame.session_id)
        words += (
            _FRAME_CODES[frame.sender, frame.kind, frame.first_tag, frame.spoken], frame.user_id, frame.chat_id,
            order_of(frame.seq, frame.epoch), frame.tag,
        )  # fmt: skip
    return client.NOTE_ACTIVITY, names, words


def order_of(seq: int | None, epoch: str) -> int | str:
    """Return the order argument of the scripts: empty, `seq` or `seq@epoch`."""
    if seq is None:
        return ""
    return f"{seq}@{epoch}" if epoch else seq


def note_presence(sessions: Mapping[str, str], wrote: Collection[str]) -> list[Call]:
    """Build one call per shard.

    Args:
        sessions: the session of each user's last frame, by user id.
        wrote: the users who wrote a message.
    """
    users = list(sessions)
    window = to_milliseconds(settings.AFTERTOUCH_CONVERSATION_WINDOW)
    made: list[Call] = []
    for shard, numbers in by_shard(users).items():
        group = [users[number] for number in numbers]
        words = [word for each in group for word in (sessions[each], int(each in wrote))]
        made.append((client.NOTE_PRESENCE, [client.PRESENCE[shard] + each for each in group], [window, *words]))
    return made


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
        (to_milliseconds(lease), *session_ids),
    )


def confirm(silences: Sequence[Silence]) -> list[Call]:
    return [
        (
            client.CONFIRM,
            [*_confirm_keys(shard), *_session_keys(shard, group)],
            [to_milliseconds(SESSION_LIFETIME), *_flatten(group)],
        )
        for shard, group in _grouped(silences)
    ]


def _confirm_keys(shard: int) -> list[str]:
    return [client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard], client.COUNTS[shard]]


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
            [client.SIGNS[shard], *_session_keys(shard, [silences[number] for number in numbers])],
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
