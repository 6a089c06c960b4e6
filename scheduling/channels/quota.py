"""Count messages per target over all workers, in Redis and by the Redis clock.

Vendors block a robot that exceeds its quota, so no Redis means no grant. The script is `quota.lua`. The keys of a
target share a hash tag. A target's name is a hash, because robot URLs are secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any, Self

import redis
from django.conf import settings
from redis.exceptions import NoScriptError, RedisError

from scheduling.channels.base import Channel, Message, Quota
from scheduling.redis_client import connect_redis

SCRIPT = Path(__file__).with_name("quota.lua").read_text(encoding="utf-8")
SCRIPT_SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
UNAVAILABLE_DELAY = timedelta(seconds=5)  #: delay before the next query after Redis did not answer
MARGIN = timedelta(milliseconds=200)  #: added to each window: evenly granted messages may arrive unevenly
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Grant:
    """`granted` messages may be sent now. The next slot is free after `next_in` (zero: at once)."""

    granted: int
    next_in: timedelta


def receiver_key(channel: Channel, message: Message) -> str:
    """Return the key by which a vendor counts: the robot, independent of the channel row."""
    return f"{channel.kind}:{channel.target_key(message)}"


class QuotaGate:
    """Grant quota slots. Thread-safe. A call blocks for one round trip, or about a second if Redis is unavailable."""

    def __init__(self, client: redis.Redis, margin: timedelta = MARGIN) -> None:
        self._redis = client
        self._margin = margin

    @classmethod
    def connect(cls, url: str, margin: timedelta = MARGIN) -> Self:
        """Return a gate with its own connections."""
        return cls(connect_redis(url, timeout=settings.TIMEOUTS.redis_quota), margin)

    def acquire(self, quotas: Sequence[Quota], wanted: Mapping[str, int]) -> dict[str, Grant]:
        """Take slots for each target key in one round trip. Call it right before sending: a slot counts from now.

        Without quotas everything is granted without Redis. An unreachable Redis grants 0 and raises nothing.
        """
        if not quotas:
            return {key: Grant(count, timedelta(0)) for key, count in wanted.items()}
        limits = [part for quota in quotas for part in (quota.limit, (quota.window + self._margin) // MICROSECOND)]
        targets = list(wanted)
        try:
            replies = self._run([(*_key_names(key), wanted[key], *limits) for key in targets])
        except RedisError:
            replies = [None] * len(targets)
        return {key: _parse_grant(reply) for key, reply in zip(targets, replies, strict=True)}

    def throttle(self, target_key: str, span: timedelta) -> bool:
        """Grant a throttled target nothing for `span`. Return False if Redis did not answer."""
        _, name = _key_names(target_key)
        try:
            return bool(self._redis.set(name, 1, px=max(1, span // timedelta(milliseconds=1))))
        except RedisError:
            return False

    def close(self) -> None:
        self._redis.close()

    def _run(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        replies = self._pipeline(calls)
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:  # a new or flushed server: these calls took no slot
            self._redis.script_load(SCRIPT)
            for place, reply in zip(unknown, self._pipeline([calls[place] for place in unknown]), strict=True):
                replies[place] = reply
        return replies

    def _pipeline(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(SCRIPT_SHA, 2, *call)
            return pipe.execute(raise_on_error=False)


def _key_names(target_key: str) -> tuple[str, str]:
    tag = sha256(target_key.encode("utf-8", "replace")).hexdigest()[:32]
    return f"at:quota:{{{tag}}}:log", f"at:quota:{{{tag}}}:mute"


def _parse_grant(reply: Any) -> Grant:
    if not isinstance(reply, list):
        return Grant(0, UNAVAILABLE_DELAY)
    granted, wait = reply
    return Grant(int(granted), timedelta(microseconds=int(wait)))
