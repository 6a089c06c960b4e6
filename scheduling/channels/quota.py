"""Count messages per target over all workers, in Redis and by the Redis clock.

Vendors block a robot that exceeds its quota, so no Redis means no grant. `acquire` counts what is sent (`quota.lua`)
and guarantees the limit. `reserve` plans (`quota_plan.lua`): each touch waits for a slot of its own. The keys of a
target share a hash tag. A target's name is a hash, because robot URLs are secrets.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any, NamedTuple, Self

import redis
from django.conf import settings
from redis.exceptions import NoScriptError, RedisError

from scheduling.channels.base import Channel, Message, Quota
from scheduling.redis_client import connect_redis

UNAVAILABLE_DELAY = timedelta(seconds=5)  #: delay before the next query after Redis did not answer
NEAR_SLOT = timedelta(seconds=4)  #: the sender waits for a slot this near; shorter than the deadline of a batch
MARGIN = timedelta(milliseconds=200)  #: added to each window: evenly granted messages may arrive unevenly
MICROSECOND = timedelta(microseconds=1)


class Script:
    """A script of this folder, which Redis calls by its hash."""

    def __init__(self, name: str) -> None:
        self.text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


GRANT, PLAN = Script("quota.lua"), Script("quota_plan.lua")


class SlotRequest(NamedTuple):
    """A touch that needs a slot of its target."""

    longest: timedelta  #: the touch expires after this wait
    slot_came: bool = False  #: it waited for a slot that has come: it goes if the target has one free


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
        self._asks_again_at = 0.0  #: monotonic time; plans wait for it after Redis did not answer

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
        limits = self._list_limits(quotas)
        targets = list(wanted)
        try:
            replies = self._run(GRANT, [(2, *_key_names(key), wanted[key], *limits) for key in targets])
        except RedisError:
            replies = [None] * len(targets)
        return {key: _parse_grant(reply) for key, reply in zip(targets, replies, strict=True)}

    def reserve(
        self,
        quotas: Sequence[Quota],
        wanted: Mapping[tuple[str, int], Sequence[SlotRequest]],
        in_transit: Mapping[str, int] | None = None,
    ) -> dict[tuple[str, int], list[timedelta | None]]:
        """Reserve a slot for each request by target key and priority, in one round trip.

        Return the wait until each slot; zero: send now; None: the slot would come too late and is not taken. A request
        whose slot came goes at once if the target grants one within `NEAR_SLOT`, after the messages `in_transit` of
        this process, which have no grant yet. Otherwise it gets another slot. Slots are distinct over all processes and
        never given back. A slot in the past is forgotten.

        An unreachable Redis lets all wait for `UNAVAILABLE_DELAY` or up to twice that. It is asked again after that
        delay, so that a Redis that hangs costs the caller at most one timeout in that time.
        """
        calls = sorted(wanted, key=lambda call: call[1])
        if time.monotonic() >= self._asks_again_at:
            limits = [len(quotas), *self._list_limits(quotas)]
            held = in_transit or {}
            try:
                replies = self._run(
                    PLAN, [_plan_call(*call, held.get(call[0], 0), limits, wanted[call]) for call in calls]
                )
            except RedisError:
                self._asks_again_at = time.monotonic() + UNAVAILABLE_DELAY.total_seconds()
            else:
                return {call: _parse_waits(reply, wanted[call]) for call, reply in zip(calls, replies, strict=True)}
        return {call: _parse_waits(None, wanted[call]) for call in calls}

    def _list_limits(self, quotas: Sequence[Quota]) -> list[int]:
        return [part for quota in quotas for part in (quota.limit, (quota.window + self._margin) // MICROSECOND)]

    def throttle(self, target_key: str, span: timedelta) -> bool:
        """Grant a throttled target nothing for `span`. Return False if Redis did not answer."""
        _, name = _key_names(target_key)
        try:
            return bool(self._redis.set(name, 1, px=max(1, span // timedelta(milliseconds=1))))
        except RedisError:
            return False

    def close(self) -> None:
        self._redis.close()

    def _run(self, script: Script, calls: list[tuple[Any, ...]]) -> list[Any]:
        replies = self._pipeline(script, calls)
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:  # a new or flushed server: these calls took no slot
            self._redis.script_load(script.text)
            for place, reply in zip(unknown, self._pipeline(script, [calls[place] for place in unknown]), strict=True):
                replies[place] = reply
        return replies

    def _pipeline(self, script: Script, calls: list[tuple[Any, ...]]) -> list[Any]:
        with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(script.sha, *call)
            return pipe.execute(raise_on_error=False)


def _key_names(target_key: str) -> tuple[str, str]:
    tag = sha256(target_key.encode("utf-8", "replace")).hexdigest()[:32]
    return f"at:quota:{{{tag}}}:log", f"at:quota:{{{tag}}}:mute"


def _parse_grant(reply: Any) -> Grant:
    if not isinstance(reply, list):
        return Grant(0, UNAVAILABLE_DELAY)
    granted, wait = reply
    return Grant(int(granted), timedelta(microseconds=int(wait)))


def _plan_call(
    target_key: str, priority: int, in_transit: int, limits: list[int], requests: Sequence[SlotRequest]
) -> tuple[Any, ...]:
    log, mute = _key_names(target_key)
    plans = [f"{log.removesuffix('log')}plan:{level}" for level in range(priority + 1)]
    touches = [part for each in requests for part in (each.longest // MICROSECOND, int(each.slot_came))]
    return (2 + len(plans), log, mute, *plans, NEAR_SLOT // MICROSECOND, in_transit, *limits, *touches)


def _parse_waits(reply: Any, requests: Sequence[SlotRequest]) -> list[timedelta | None]:
    if not isinstance(reply, list):
        return [UNAVAILABLE_DELAY * (1 + random.random()) for _ in requests]  # noqa: S311
    return [timedelta(microseconds=wait) if wait >= 0 else None for wait in map(int, reply)]
