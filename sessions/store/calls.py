"""What is asked of the scripts: their keys and arguments, in the order that the header of each Lua file tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings

from sessions.frames import KINDS, Frame
from sessions.store import client
from sessions.store.client import Call

KEPT = timedelta(hours=24)  #: a session that was never closed vanishes so long after its last frame
CLOSED_KEPT = timedelta(hours=1)  #: longer than a frame may be late
TYPING_PAUSE = timedelta(minutes=2)  #: an agent who began to type and went away does not pause for ever
RENEWED_EVERY = timedelta(hours=1)
PAUSE_COUNTS = KEPT - 2 * RENEWED_EVERY  #: after its last frame; by then the session itself is still there
TYPED_LATELY = timedelta(seconds=10)  #: who typed so lately, and has not sent it, is typing

#: Side, flags and kind of a frame in one word (see note_activity.lua).
_WHAT = {
    (sender, kind, first_tag, spoken): f"{sender[0]}{first_tag + 2 * spoken}{kind}"
    for sender, kinds in KINDS.items()
    for kind in kinds
    for first_tag in (False, True)
    for spoken in (False, True)
}

_EPOCH, _MS = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)

Silence = tuple[str, int]  #: a session and the arming that it was silent after


def note_activity(frames: Sequence[Frame], groups: Mapping[int, Sequence[int]]) -> list[Call]:
    """`groups`: the places of the frames by shard."""
    return [_note_activity(shard, [frames[number] for number in numbers]) for shard, numbers in groups.items()]


def _note_activity(shard: int, frames: Sequence[Frame]) -> Call:
    names = [client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard], client.ACTIVE[shard]]
    names += [client.PAUSED[shard], client.COUNTS[shard], client.SIGNS[shard]]
    prefix = client.SESSION[shard]
    words: list[Any] = [ms(KEPT), ms(CLOSED_KEPT), ms(TYPING_PAUSE), ms(RENEWED_EVERY), len(prefix)]
    for frame in frames:
        names.append(prefix + frame.session_id)
        words += (
            _WHAT[frame.sender, frame.kind, frame.first_tag, frame.spoken], frame.user_id, frame.chat_id,
            order_of(frame.seq, frame.epoch), frame.tag,
        )  # fmt: skip
    return client.NOTE_ACTIVITY, names, words


def order_of(seq: int | None, epoch: str) -> int | str:
    """As the scripts read it."""
    if seq is None:
        return ""
    return f"{seq}@{epoch}" if epoch else seq


def note_presence(sessions: Mapping[str, str], wrote: Collection[str]) -> list[Call]:
    """By user, the session of their last frame; and the users who wrote a message."""
    users = list(sessions)
    window = ms(settings.AFTERTOUCH_CONVERSATION_WINDOW)
    made: list[Call] = []
    for shard, numbers in by_shard(users).items():
        group = [users[number] for number in numbers]
        writers = [each for each in group if each in wrote]
        names = [client.PRESENCE[shard] + each for each in group] + [client.WROTE[shard] + each for each in writers]
        made.append((client.NOTE_PRESENCE, names, [window, *(sessions[each] for each in group), *[""] * len(writers)]))
    return made


def note_expired(user_id: str, key: str, tag: str, window: timedelta) -> Call:
    shard = client.shard_of(user_id)
    words = [ms(KEPT), user_id, user_id, tag, key, ms(window)]
    names = [client.DUE[shard], client.POLICIES[shard], client.COUNTS[shard], client.SESSION[shard] + user_id]
    return client.NOTE_EXPIRED, names, words


def peek_silent(shard: int, limit: int) -> Call:
    return client.PEEK_SILENT, (client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard]), (limit,)


def claim_silent(shard: int, session_ids: Sequence[str], lease: timedelta) -> Call:
    names = [client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard]]
    return (
        client.CLAIM_SILENT,
        names + [client.SESSION[shard] + each for each in session_ids],
        (ms(lease), *session_ids),
    )


def confirm(silences: Sequence[Silence]) -> list[Call]:
    return [
        (client.CONFIRM, [*_confirmed_in(shard), *_sessions(shard, group)], [ms(KEPT), *_flat(group)])
        for shard, group in _grouped(silences)
    ]


def _confirmed_in(shard: int) -> list[str]:
    return [client.DUE[shard], client.INFLIGHT[shard], client.POLICIES[shard], client.COUNTS[shard]]


def release(silences: Sequence[Silence]) -> list[Call]:
    return [
        (client.RELEASE, [client.DUE[shard], client.INFLIGHT[shard], *_sessions(shard, group)], _flat(group))
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
            [client.SIGNS[shard], *_sessions(shard, [silences[number] for number in numbers])],
            [len(client.SESSION[shard]), ms(TYPED_LATELY), *(word for number in numbers for word in asked[number])],
        )
        for shard, numbers in groups.items()
    ]


def tally() -> list[Call]:
    """One a shard."""
    return [
        (
            client.TALLY,
            [client.DUE[shard], client.INFLIGHT[shard], client.PAUSED[shard], client.COUNTS[shard]],
            [ms(PAUSE_COUNTS)],
        )
        for shard in range(client.SHARDS)
    ]


def forget_pauses(shard: int, session_ids: Sequence[str]) -> Call:
    names = [client.PAUSED[shard], client.COUNTS[shard], *(client.SESSION[shard] + each for each in session_ids)]
    return client.FORGET_PAUSES, names, [ms(PAUSE_COUNTS), *session_ids]


def presence_key(user_id: str) -> str:
    return client.PRESENCE[client.shard_of(user_id)] + user_id


def wrote_key(user_id: str) -> str:
    return client.WROTE[client.shard_of(user_id)] + user_id


def by_shard(ids: Sequence[str]) -> dict[int, list[int]]:
    """The places of sessions (or users) in the list, by shard, in their order."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(ids):
        groups[client.shard_of(each)].append(number)
    return groups


def ms(span: timedelta) -> int:
    return span // _MS


def _grouped(silences: Sequence[Silence]) -> list[tuple[int, list[Silence]]]:
    groups = by_shard([session_id for session_id, _ in silences])
    return [(shard, [silences[number] for number in numbers]) for shard, numbers in groups.items()]


def _sessions(shard: int, silences: Sequence[Silence]) -> list[str]:
    return [client.SESSION[shard] + session_id for session_id, _ in silences]


def _flat(silences: Sequence[Silence]) -> list[Any]:
    return [word for silence in silences for word in silence]
