"""Define what the store returns."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from sessions.store.client import decode_text


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
