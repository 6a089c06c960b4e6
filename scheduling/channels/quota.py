"""Count messages per target over all workers, in Redis and by the Redis clock.

Vendors block a robot that exceeds its quota, so no Redis means no grant. `acquire` counts what is sent (`quota.lua`)
and guarantees the limits. `reserve` plans (`quota_plan.lua`): each touch waits for a slot of its own. A granted slot
moves with its message (`HeldSlot`). The keys of a target share a hash tag. A target's name is a hash, because robot
URLs are secrets. A flush of Redis forgets all counts, also those of the day and the month, which start in the server's
time zone (`TIME_ZONE`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Self
from uuid import UUID

import structlog
from django.conf import settings
from django.utils.timezone import get_default_timezone

from scheduling.channels.base import CalendarQuota, Channel, Message, Quota
from scheduling.redis_client import NoScriptError, Redis, RedisError, Script, connect_redis

LONGEST_PLAN = timedelta(days=100)  #: no slot is planned further ahead
SKEW = timedelta(hours=1)  #: most that the clocks of this node and of Redis may differ


def list_period_starts(period: str, now: datetime, longest: timedelta) -> list[datetime]:
    """Return the starts of the periods ("day" or "month") from now until `longest` later, and the end of the last."""
    latest = now + min(longest, LONGEST_PLAN) + SKEW
    day = (now - SKEW).astimezone(get_default_timezone()).date()
    found = [_start_of(day if period == "day" else day.replace(day=1))]
    while found[-1] <= latest:
        day = found[-1].date()
        following = day + timedelta(days=1) if period == "day" else (day + timedelta(days=32)).replace(day=1)
        found.append(_start_of(following))
    return found


def _start_of(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=get_default_timezone())


log = structlog.get_logger(__name__)

UNAVAILABLE_DELAY = timedelta(seconds=5)  #: delay before the next query after Redis did not answer
LOWEST_PRIORITY = 2
NEAR_SLOT = timedelta(seconds=4)  #: the sender waits for a slot this near; shorter than the deadline of a batch
MARGIN = timedelta(milliseconds=200)  #: added to each window: evenly granted messages may arrive unevenly
FRESH = MARGIN.total_seconds() / 2  #: seconds; the margin covers such a delay, so that the slot stays where it is
MICROSECOND = timedelta(microseconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


_LUA = Path(__file__).parent
GRANT, PLAN, MOVE = (
    Script(_LUA / "quota_list.lua", _LUA / f"{name}.lua") for name in ("quota", "quota_plan", "quota_move")
)
RETURN = Script(_LUA / "quota_return.lua")


class SlotRequest(NamedTuple):
    """A touch that needs a slot of its target."""

    longest: timedelta  #: the touch expires after this wait
    slot_came: bool = False  #: it waited for a slot that has come: it goes if the target has one free


@dataclass(frozen=True, slots=True)
class Grant:
    """`granted` messages may be sent now. The next slot is free after `next_in` (zero: at once)."""

    granted: int
    next_in: timedelta
    slot: int = field(default=0, compare=False)  #: instant of the grant in µs of Redis, for `move`


class PeriodUse(NamedTuple):
    """How far a target has used its limit of a "day" or "month"."""

    period: str
    used: int  #: messages granted
    limit: int
    ends_in: timedelta


class QuotaState(NamedTuple):
    """How far a target has used its quotas."""

    muted: timedelta  #: the vendor has muted it for this time; zero: it has not
    last_slot: timedelta | None  #: until the last reserved slot; None: no slot is ahead
    uses: tuple[PeriodUse, ...]


def receiver_key(channel: Channel, message: Message) -> str:
    """Return the key by which a vendor counts: the robot or the person, independent of the channel row."""
    return f"{channel.kind}:{channel.quota_key(message)}"


class QuotaGate:
    """Grant quota slots. Thread-safe. A call blocks for one round trip, or about a second if Redis is unavailable."""

    def __init__(self, client: Redis, margin: timedelta = MARGIN) -> None:
        self._redis = client
        self._margin = margin
        self._asks_again_at = 0.0  #: monotonic time; plans wait for it after Redis did not answer

    @classmethod
    def connect(cls, url: str, margin: timedelta = MARGIN) -> Self:
        """Return a gate with its own connections."""
        return cls(connect_redis(url, timeout=settings.TIMEOUTS.redis_quota), margin)

    def acquire(self, quotas: Sequence[Quota | CalendarQuota], wanted: Mapping[str, int]) -> dict[str, Grant]:
        """Take slots for each target key in one round trip. Call it right before sending: a slot counts from now.

        Without quotas everything is granted without Redis. An unreachable Redis grants 0 and raises nothing.
        """
        if not quotas:
            return {key: Grant(count, timedelta(0)) for key, count in wanted.items()}
        limits = self._list_limits(quotas)
        targets = list(wanted)
        try:
            replies = self._run(GRANT, [(3, *name_quota_keys(key), wanted[key], *limits) for key in targets])
        except RedisError:
            replies = [None] * len(targets)
        grants = dict.fromkeys(targets, Grant(0, UNAVAILABLE_DELAY))
        for key, reply in zip(targets, replies, strict=True):
            if isinstance(reply, list):  # else an error
                granted, wait, slot = map(int, reply)
                grants[key] = Grant(granted, timedelta(microseconds=wait), slot)
        return grants

    def move(self, quotas: Sequence[Quota | CalendarQuota], target_key: str, slot: int) -> tuple[int, timedelta]:
        """Let the slot of a grant count from now, in a place that keeps within all windows.

        Return the moved slot; 0 and the time until the next attempt if there is no place yet.
        """
        windows = [each for each in quotas if isinstance(each, Quota)]
        limits = [part for each in windows for part in (each.limit, (each.window + self._margin) // MICROSECOND)]
        try:
            ((wait, moved),) = self._run(MOVE, [(2, *name_quota_keys(target_key)[:2], slot, len(windows), *limits)])
        except (RedisError, TypeError):  # a reply may be an error
            return 0, UNAVAILABLE_DELAY
        return int(moved), timedelta(microseconds=int(wait))

    def reserve(
        self,
        quotas: Sequence[Quota | CalendarQuota],
        wanted: Mapping[tuple[str, int], Sequence[SlotRequest]],
        in_transit: Mapping[str, int] | None = None,
    ) -> dict[tuple[str, int], list[timedelta | None]]:
        """Reserve a slot for each request by target key and priority, in one round trip.

        Return the wait until each slot; zero: send now; None: the slot would come too late and is not taken. A request
        whose slot came goes at once if the target grants one within `NEAR_SLOT`, after the messages `in_transit` of
        this process, which have no grant yet. Otherwise it gets the next slot, before those that wait for theirs.
        Slots are distinct over all processes. A slot in the past is forgotten.

        An unreachable Redis lets all wait for `UNAVAILABLE_DELAY` or up to twice that. It is asked again after that
        delay, so that a Redis that hangs costs the caller at most one timeout in that time.
        """
        calls = sorted(wanted, key=lambda call: call[1])
        if time.monotonic() >= self._asks_again_at:
            longest = max((each.longest for group in wanted.values() for each in group), default=timedelta(0))
            limits = self._list_limits(quotas, longest)
            asked: list[tuple[Any, ...]] = []
            for key, priority in calls:
                names = [*name_quota_keys(key), *_plan_names(key, priority)]
                touches = [
                    part
                    for each in wanted[key, priority]
                    for part in (each.longest // MICROSECOND, int(each.slot_came))
                ]
                waiting = (in_transit or {}).get(key, 0)
                asked.append((len(names), *names, NEAR_SLOT // MICROSECOND, waiting, *limits, *touches))
            try:
                replies = self._run(PLAN, asked)
            except RedisError:
                self._asks_again_at = time.monotonic() + UNAVAILABLE_DELAY.total_seconds()
            else:
                return {call: _parse_waits(reply, wanted[call]) for call, reply in zip(calls, replies, strict=True)}
        return {call: _parse_waits(None, wanted[call]) for call in calls}

    def give_back(self, slots: Mapping[tuple[str, int], Sequence[tuple[UUID, timedelta]]]) -> None:
        """Give slots of cancelled touches to the next ones: by target key and priority, the touch and the wait for it.

        If Redis does not answer, they stay unused. Idempotent while no other touch has taken them.
        """
        calls = [
            (
                1,
                _plan_names(key, priority)[-1],
                *(part for each, wait in found for part in (str(each), wait // MICROSECOND)),
            )
            for (key, priority), found in slots.items()
        ]
        if time.monotonic() >= self._asks_again_at:
            try:
                self._run(RETURN, calls)
            except RedisError:
                self._asks_again_at = time.monotonic() + UNAVAILABLE_DELAY.total_seconds()

    def _list_limits(
        self, quotas: Sequence[Quota | CalendarQuota], longest: timedelta = timedelta(0)
    ) -> list[str | int]:
        """Return the arguments of the scripts for these quotas. Periods reach `longest` ahead."""
        windows = [each for each in quotas if isinstance(each, Quota)]
        found: list[str | int] = [len(windows)]
        for each in windows:
            found += [each.limit, (each.window + self._margin) // MICROSECOND]
        found.append(len(quotas) - len(windows))
        for quota in quotas:
            if isinstance(quota, CalendarQuota):
                starts = list_period_starts(quota.period, datetime.now(UTC), longest)
                found += [quota.period, quota.limit, len(starts), *map(_microseconds, starts)]
        return found

    def read_states(self, targets: Sequence[tuple[str, Sequence[Quota | CalendarQuota]]]) -> list[QuotaState]:
        """Return the state of each target key with its quotas, in one round trip. Raises `RedisError`."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for key, _ in targets:
                _, mute, used = name_quota_keys(key)
                pipe.pttl(mute)
                pipe.hgetall(used)
                for name in _plan_names(key, LOWEST_PRIORITY)[: 2 * (LOWEST_PRIORITY + 1)]:
                    pipe.lindex(name, -1)
            (seconds, micros), *replies = pipe.execute()
        now = EPOCH + timedelta(seconds=seconds, microseconds=micros)
        size = 2 + 2 * (LOWEST_PRIORITY + 1)
        return [
            _parse_state(replies[number * size : (number + 1) * size], quotas, now)
            for number, (_, quotas) in enumerate(targets)
        ]

    def throttle(self, target_key: str, span: timedelta) -> bool:
        """Grant a throttled target nothing for `span`, or longer if it is muted for longer.

        Return False if Redis did not answer.
        """
        _, name, _ = name_quota_keys(target_key)
        milliseconds = max(1, span // timedelta(milliseconds=1))
        try:
            with self._redis.pipeline(transaction=True) as pipe:
                pipe.pexpire(name, milliseconds, gt=True)  # first: a mute that ends just now is set again
                pipe.set(name, 1, px=milliseconds, nx=True)
                pipe.execute()
        except RedisError:
            return False
        return True

    def close(self) -> None:
        self._redis.close()

    def _run(self, script: Script, calls: list[tuple[Any, ...]]) -> list[Any]:
        replies = self._pipeline(script, calls)
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:  # a new or flushed server: these calls took no slot
            self._redis.script_load(script.text)
            for place, reply in zip(unknown, self._pipeline(script, [calls[place] for place in unknown]), strict=True):
                replies[place] = reply
        for error in {str(reply) for reply in replies if isinstance(reply, RedisError)}:
            log.error("quota_script_failed", error=error)  # no outage: its touches wait until someone mends the keys
        return replies

    def _pipeline(self, script: Script, calls: list[tuple[Any, ...]]) -> list[Any]:
        with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(script.sha, *call)
            return pipe.execute(raise_on_error=False)


def name_quota_keys(target_key: str) -> tuple[str, str, str]:
    """Return the keys of the granted slots, of the mute time and of the counts."""
    tag = sha256(target_key.encode("utf-8", "replace")).hexdigest()[:32]
    return f"at:quota:{{{tag}}}:log", f"at:quota:{{{tag}}}:mute", f"at:quota:{{{tag}}}:used"


def _plan_names(target_key: str, priority: int) -> list[str]:
    prefix = name_quota_keys(target_key)[0].removesuffix("log")
    return [f"{prefix}{name}:{level}" for name in ("plan", "late", "ahead", "free") for level in range(priority + 1)]


def _microseconds(at: datetime) -> int:
    return (at - EPOCH) // MICROSECOND


def _parse_state(reply: list[Any], quotas: Sequence[Quota | CalendarQuota], now: datetime) -> QuotaState:
    muted, counts, *plans = reply
    last = max((EPOCH + int(at) * MICROSECOND for at in plans if at), default=now)
    uses = []
    for quota in quotas:
        if isinstance(quota, CalendarQuota):
            starts = list_period_starts(quota.period, now, timedelta(0))
            number = max(place for place, start in enumerate(starts) if start <= now)
            used = int(counts.get(f"{quota.period}:{_microseconds(starts[number])}".encode(), 0))
            uses.append(PeriodUse(quota.period, used, quota.limit, starts[number + 1] - now))
    return QuotaState(timedelta(milliseconds=max(muted, 0)), last - now if last > now else None, tuple(uses))


def _parse_waits(reply: Any, requests: Sequence[SlotRequest]) -> list[timedelta | None]:
    if not isinstance(reply, list):
        return [UNAVAILABLE_DELAY * (1 + random.random()) for _ in requests]  # noqa: S311
    return [timedelta(microseconds=wait) if wait >= 0 else None for wait in map(int, reply)]


@dataclass(slots=True)
class HeldSlot:
    """The granted slot of a message that is not sent yet. It is moved to the instant at which the message is sent.

    A slot counts from its grant, and a slow name server, connection or TLS handshake delays the request. Without the
    move, a receiver could get delayed messages together with those of the next window, more than its quota.
    """

    gate: QuotaGate
    quotas: Sequence[Quota | CalendarQuota]
    target_key: str
    slot: int
    counted_at: float  #: monotonic time, not after the grant

    async def renew(self) -> None:
        """Move a slot that is more than 0.1 s old to now. Wait while its receiver has no place for it.

        The caller has a time limit. A message of a minute's quota waits only if its grant is a minute old.
        """
        if not any(isinstance(each, Quota) for each in self.quotas):
            return
        while (asked_at := time.monotonic()) - self.counted_at > FRESH:
            moved, wait = await asyncio.to_thread(self.gate.move, self.quotas, self.target_key, self.slot)
            if moved:
                self.slot, self.counted_at = moved, asked_at
                return
            await asyncio.sleep(wait.total_seconds())
