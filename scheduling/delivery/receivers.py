"""Know the receivers of touches: their channels and addresses, who has room, and who is gone or does not answer.

A route is the channel instance and the address of a touch. An address that answered HTTP 410 (gone) is disabled. Its
row expires `AFTERTOUCH_DISABLED_TARGET_DAYS` after the last 410. An operator who sets an address again enables it at
once. Lookups name their targets, because the table may hold a million rows.

A receipt names a message by the vendor's id. The attempts of touches hold it too, but finding it there would read all
of them.

Each process keeps a lane for each receiver: when it takes its next touch. A circuit breaker stops calls to a dead
endpoint: after several failures in a row its touches wait instead of timing out. Waiting touches are deferred again at
each rest, and each deferral writes their row. Rests therefore grow while trials fail: 30 s, 1 min, 2 min … 10 min. A
recovered receiver is noticed after at most that time.

A process reports to Redis the receivers that it holds deliveries for, that rest, or that it gave instants ahead. The
reports live for a short time, for the back office and the API.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple, cast
from uuid import UUID

import structlog
from django.conf import settings

from scheduling import sql
from scheduling.channels.base import Channel, Message, Outcome, Transient, Unknown, channel_kinds, find_escape
from scheduling.channels.quota import receiver_key
from scheduling.delivery.outgoing import Delivery
from scheduling.ids import new_id
from scheduling.models import Community
from scheduling.models.encrypted import Sealed, Unreadable
from scheduling.models.node import digest_address
from scheduling.models.touch import Priority
from scheduling.policy.specs import ChannelSpec, CustomerSpec
from scheduling.redis_client import RedisError, connect_once

log = structlog.get_logger(__name__)


# --- channels and addresses -------------------------------------------------------------------------------------------


class NoTarget(Exception):
    """A touch has no usable address. `reason` is the code of its failure."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class Route(NamedTuple):
    """The channel and the target of a touch."""

    channel: Channel
    target: Mapping[str, Any]
    receiver: str = ""  #: key of the receiver's lane; empty: not known yet
    vendor_key: str = ""  #: key by which the quotas of the channel count


_NONE = UUID(int=0)
_channels: dict[int, tuple[ChannelSpec, Channel]] = {}


def channel_of(spec: ChannelSpec) -> Channel:
    """Return the channel for its current settings. Instances are cached per process and setting.

    Raises:
        NoTarget: the channel is retired or misconfigured.
        Unreadable: this node lacks the encryption key of its settings.
    """
    known = _channels.get(spec.id)
    if known and (known[0] is spec or known[0] == spec):
        return known[1]
    kind = channel_kinds().get(spec.kind)
    if spec.retired or kind is None:
        raise NoTarget("channel_retired", f"channel {spec.key} ({spec.kind})")
    if isinstance(spec.config, Sealed):
        spec.config.open()
    try:
        channel = kind(spec.config, spec.timeout)
    except ValueError as error:
        raise NoTarget("channel_misconfigured", f"channel {spec.key}: {error}") from None
    if spec.limits:
        channel.quotas = (*channel.quotas, *spec.limits)  # type: ignore[misc] # for this row only
    _channels[spec.id] = (spec, channel)
    return channel


def find_preview_escape(spec: ChannelSpec) -> Callable[[str], str]:
    """Return the escape of a channel's format; that of plain text if the channel cannot be used here."""
    try:
        return find_escape(channel_of(spec))
    except (NoTarget, Unreadable):
        return str


def target_for(
    spec: ChannelSpec,
    channel: Channel,
    customer: CustomerSpec,
    chat_id: str,
    communities: Mapping[str, Mapping[str, Any]],
    disabled: Container[Target] | None = None,
) -> Mapping[str, Any]:
    """Return the community's target or the customer's address.

    `disabled` holds the disabled targets of the batch (see `find_disabled_targets`). Without it this one target is
    looked up.

    Raises:
        NoTarget: there is no target, or it is disabled.
    """
    if channel.address_key:
        address = customer.addresses.get(channel.address_key)
        target = {"address": address} if address else {}
    else:
        targets = communities.get(chat_id, {})
        target = targets.get(spec.key) or targets.get(spec.kind) or {}
    if channel.needs_target and not target:
        raise NoTarget("no_target", f"no {spec.kind} target for {chat_id or customer.user_id}")
    if disabled is None:
        disabled = find_disabled([(spec.id, target_digest(spec, target))])
    if disabled and (spec.id, target_digest(spec, target)) in disabled:
        raise NoTarget("target_disabled", "the vendor answered that this receiver is gone")
    return target


def find_route(
    spec: ChannelSpec,
    customer: CustomerSpec,
    chat_id: str,
    communities: Mapping[str, Mapping[str, Any]],
    disabled: Container[Target],
) -> Route | None:
    """Return the route of a touch before its message exists. None: judging or the sender will report why not."""
    try:
        channel = channel_of(spec)
        target = target_for(spec, channel, customer, chat_id, communities, disabled)
        blank = Message(
            _NONE, _NONE, customer.user_id, chat_id, "", "", "", "", "", "", {},
            target=target, spoke_at=customer.conversation_at,
        )  # fmt: skip
        vendor_key = receiver_key(channel, blank) if channel.quotas else ""
        return Route(channel, target, lane_key(spec, channel, blank), vendor_key)
    except Exception:
        return None


def lane_key(spec: ChannelSpec, channel: Channel, message: Message) -> str:
    """Return the key of the lane to a receiver: each channel row has a lane of its own."""
    return f"{spec.id}:{channel.target_key(message)}"


def target_digest(spec: ChannelSpec, target: Mapping[str, Any]) -> str:
    """Return a digest that identifies a receiver without exposing its address."""
    address = target.get("url") or target.get("address") or spec.config.get("url") or spec.key
    return digest_address(address)


def find_disabled_targets(
    wanted: Iterable[tuple[ChannelSpec, CustomerSpec, str]], communities: Mapping[str, Mapping[str, Any]]
) -> set[Target]:
    """Return the disabled targets among those of `wanted` (channel, customer, chat id), in at most two statements."""
    asked = list(wanted)
    struck = channels_with_disabled(spec.id for spec, _, _ in asked)
    targets: set[Target] = set()
    for spec, customer, chat_id in asked:
        if spec.id in struck:
            with suppress(NoTarget, Unreadable):  # reported when the touch is sent
                target = target_for(spec, channel_of(spec), customer, chat_id, communities, ())
                targets.add((spec.id, target_digest(spec, target)))
    return find_disabled(targets)


def load_community_targets(chat_ids: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return the targets of communities, by channel key or kind."""
    wanted = sorted({chat_id for chat_id in chat_ids if chat_id})
    if not wanted:
        return {}
    rows = Community.objects.filter(chat_id__in=wanted, retired_at=None).values_list("chat_id", "targets")
    return {chat_id: cast(Mapping[str, Any], targets) for chat_id, targets in rows}


# --- disabled addresses -----------------------------------------------------------------------------------------------


Target = tuple[int, str]  #: channel id and digest of the address


def disabled_duration() -> timedelta:
    return timedelta(days=settings.AFTERTOUCH_DISABLED_TARGET_DAYS)


def channels_with_disabled(channel_ids: Iterable[int]) -> set[int]:
    """Return the channels that have a disabled target. For the others the caller computes no digest."""
    return {row[0] for row in sql.rows(_CHANNELS, {"channels": sorted(set(channel_ids))})}


def find_disabled(targets: Iterable[Target]) -> set[Target]:
    """Return the `targets` that are disabled."""
    wanted = sorted(set(targets))
    if not wanted:
        return set()
    given = {
        "channels": [each[0] for each in wanted],
        "digests": [each[1] for each in wanted],
        "kept": disabled_duration(),
    }
    return {(row[0], row[1]) for row in sql.rows(_AMONG, given)}


class TargetLookup:
    """Support `target in lookup`. Query the database once for each channel and target."""

    def __init__(self) -> None:
        self._channels: dict[int, bool] = {}
        self._known: dict[Target, bool] = {}

    def __contains__(self, target: object) -> bool:
        assert isinstance(target, tuple)
        channel_id, _ = target
        if channel_id not in self._channels:
            self._channels[channel_id] = bool(channels_with_disabled([channel_id]))
        if not self._channels[channel_id]:
            return False
        if target not in self._known:
            self._known[target] = bool(find_disabled([target]))
        return self._known[target]


def store_disabled_targets(found: Iterable[tuple[int, str, str, str]]) -> None:
    """Disable targets, given as channel id, digest, chat id and reason. Repeating it extends the expiry."""
    rows = sorted({(each[0], each[1]): each for each in found}.values())  # one order for all writers prevents deadlocks
    if rows:
        names = ("channels", "digests", "chats", "reasons")
        sql.execute(_DISABLE, {name: [row[place] for row in rows] for place, name in enumerate(names)})


def delete_expired_targets(limit: int) -> int:
    """Delete up to `limit` expired rows. Skip locked rows."""
    return sql.execute(_DELETE_EXPIRED, {"kept": disabled_duration(), "limit": limit})


_CHANNELS = """
SELECT c FROM unnest(%(channels)b::bigint[]) AS c
WHERE EXISTS (SELECT FROM scheduling_disabledtarget AS d WHERE d.channel_id = c)
"""

_AMONG = """
SELECT d.channel_id, d.target_digest
FROM unnest(%(channels)b::bigint[], %(digests)b::text[]) AS v(channel_id, digest)
JOIN scheduling_disabledtarget AS d ON d.channel_id = v.channel_id AND d.target_digest = v.digest
WHERE d.disabled_at > statement_timestamp() - %(kept)s::interval
"""

_DISABLE = """
INSERT INTO scheduling_disabledtarget (channel_id, target_digest, chat_id, reason, disabled_at)
SELECT channel_id, digest, chat_id, reason, statement_timestamp()
FROM unnest(%(channels)b::bigint[], %(digests)b::text[], %(chats)b::text[], %(reasons)b::text[])
    AS v(channel_id, digest, chat_id, reason)
ORDER BY channel_id, digest
ON CONFLICT (channel_id, target_digest) DO UPDATE
SET disabled_at = EXCLUDED.disabled_at, chat_id = EXCLUDED.chat_id, reason = EXCLUDED.reason
"""

_DELETE_EXPIRED = """
DELETE FROM scheduling_disabledtarget WHERE id IN (
    SELECT id FROM scheduling_disabledtarget WHERE disabled_at < statement_timestamp() - %(kept)s::interval
    ORDER BY disabled_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
"""


# --- vendors' ids of messages -----------------------------------------------------------------------------------------


VendorId = tuple[int, str]  #: channel id and the vendor's id


def store_vendor_ids(sent: Iterable[tuple[int, str, UUID]]) -> None:
    """Store channel id, vendor's id and delivery key of sent messages. A repeat has no effect."""
    rows = sorted(sent)  # one order for all writers prevents deadlocks
    if rows:
        sql.execute(
            _STORE,
            {
                "ids": [new_id() for _ in rows],
                "channels": [row[0] for row in rows],
                "vendor_ids": [row[1] for row in rows],
                "keys": [row[2] for row in rows],
            },
        )


def find_delivery_keys(wanted: Iterable[VendorId]) -> dict[VendorId, UUID]:
    """Return the delivery keys of the messages with these ids."""
    asked = sorted(set(wanted))
    if not asked:
        return {}
    given = {"channels": [each[0] for each in asked], "vendor_ids": [each[1] for each in asked]}
    return {(row[0], row[1]): row[2] for row in sql.rows(_FIND, given)}


def delete_vendor_ids(batch: list[UUID], before: datetime) -> int:
    """Delete rows of a batch whose ids are older than their retention time."""
    return sql.execute(_DELETE, {"ids": batch})


_STORE = """
INSERT INTO scheduling_vendormessage (id, channel_id, vendor_id, delivery_key)
SELECT * FROM unnest(%(ids)b::uuid[], %(channels)b::bigint[], %(vendor_ids)b::text[], %(keys)b::uuid[])
ON CONFLICT (channel_id, vendor_id) DO NOTHING
"""
_FIND = """
SELECT m.channel_id, m.vendor_id, m.delivery_key
FROM unnest(%(channels)b::bigint[], %(vendor_ids)b::text[]) AS v(channel_id, vendor_id)
JOIN scheduling_vendormessage AS m ON m.channel_id = v.channel_id AND m.vendor_id = v.vendor_id
"""
_DELETE = "DELETE FROM scheduling_vendormessage WHERE id = ANY(%(ids)b)"


# --- lanes ------------------------------------------------------------------------------------------------------------


IN_FLIGHT_PER_TARGET = 200  #: unless the channel sets `at_once`
IN_FLIGHT = (
    10_000  #: deliveries that a process holds; beyond it a receiver gets only `SMALL_SHARE`, up to twice as many
)
SMALL_SHARE = 20
WORK_AHEAD = (
    8.0  #: seconds of a receiver's work that its lane holds, or twice its calls if that is more; below `BATCH_DEADLINE`
)
LATE = 10.0  #: seconds before its deadline, from which a delivery goes before more important ones
FIRST_DURATION = 0.2  #: seconds, assumed of a receiver that has not answered yet; too short costs a second deferral
SHORTEST_DURATION = 0.01
SMOOTHING = 0.1  #: weight of the latest call
LONGEST_WAIT = 600.0  #: seconds; the estimate may be wrong for longer waits
REMEMBERED = 10_000  #: receivers, beside those with deliveries
FORGOTTEN_AT_ONCE = 100  #: receivers
REPORTED = 1_000  #: receivers in the report of a process: the resting ones, then the busiest


class LaneLoad(NamedTuple):
    """What a process knows of a receiver, or all processes together."""

    receiver: str
    chat_id: str  #: of one of its deliveries
    in_flight: int
    held: int  #: claimed, and waiting in the process for the receiver
    rate: float  #: touches a second that it takes
    rest: float  #: seconds that its circuit breaker rests


@dataclass(slots=True)
class ReceiverLane:
    """The deliveries of this process to one receiver, and how fast it takes them. Times are monotonic seconds."""

    limit: int  #: most calls in flight
    waiting: tuple[deque[Delivery], ...] = field(default_factory=lambda: tuple(deque() for _ in Priority))
    in_flight: int = 0
    held_each: list[int] = field(default_factory=lambda: [0] * len(Priority))  #: submitted, not ended; by priority
    granted: int = 0  #: of these, how many have a grant of the vendor's quota
    duration: float = 0.0  #: smoothed seconds in flight; 0: no call has ended
    chat_id: str = ""  #: of the latest delivery
    next_at: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  #: last instant given, by priority

    @property
    def rate(self) -> float:
        """Return how many touches per second the receiver takes from this process."""
        return self.limit / max(self.duration or FIRST_DURATION, SHORTEST_DURATION)

    @property
    def held(self) -> int:
        """Return how many deliveries are submitted and have not ended."""
        return sum(self.held_each)

    def next_waiting(self, now: float) -> deque[Delivery] | None:
        """Return the queue of the next delivery: the most important one, unless another waits for too long.

        A delivery that never gets its turn would be released, claimed and judged again without end.
        """
        queues = [queue for queue in self.waiting if queue]
        if not queues:
            return None
        oldest = min(queues, key=lambda queue: queue[0].clock)
        return oldest if oldest[0].left(now) < LATE else queues[0]

    def room(self, priority: int) -> int:
        """Return how many more deliveries the lane takes. Less important ones take no room of others.

        The highest priority has room of its own.
        """
        most = max(2 * self.limit, int(self.rate * WORK_AHEAD)) if self.duration else 3 * self.limit
        return most + (0 if priority else self.limit) - sum(self.held_each[: priority + 1])

    def note_duration(self, seconds: float) -> None:
        self.duration += (seconds - self.duration) * (SMOOTHING if self.duration else 1)

    def reserve_instant(self, earliest: float, priority: int) -> float:
        """Return an instant of its own for a touch, at the receiver's pace.

        It follows those of touches of the same and of more important priorities. Beyond `LONGEST_WAIT` the touches
        spread over the second half of that time.
        """
        free_at = max(earliest, *self.next_at[: priority + 1]) + 1 / self.rate
        latest = earliest + LONGEST_WAIT
        if free_at > latest:
            return latest - random.random() * LONGEST_WAIT / 2  # noqa: S311
        self.next_at[priority] = free_at
        return free_at


class ReceiverLanes:
    """The lanes of a process by receiver, with their circuit breakers. Thread-safe, except for `waiting` of a lane."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, ReceiverLane] = OrderedDict()
        self._breaker = Breaker()
        self._held = 0
        self._lock = threading.Lock()

    def find_wait(
        self, receiver: str, channel: Channel, priority: int, *, own: int, total: int
    ) -> tuple[str, float] | None:
        """Return why a touch must wait and until when, in monotonic time; None if the receiver has room.

        `own` and `total` count the touches that the caller's batch submits to this receiver, and to all.
        """
        now = time.monotonic()
        with self._lock:
            lane = self._open_lane(receiver, channel)
            rest = self._breaker.remaining_rest(receiver, now, trials=own + lane.held)
            if rest:
                return "target_down", lane.reserve_instant(now + rest, priority)
            held, share = self._held + total, lane.held + own
            if lane.room(priority) > own and (held < IN_FLIGHT or (share < SMALL_SHARE and held < 2 * IN_FLIGHT)):
                return None
            return "target_busy", lane.reserve_instant(now, priority)

    def count_ungranted(self, receiver: str) -> int:
        """Return how many deliveries are submitted and have no grant of the vendor's quota yet."""
        lane = self._lanes.get(receiver)
        return lane.held - lane.granted if lane else 0

    def note_grant(self, receiver: str) -> None:
        with self._lock:
            self._lanes[receiver].granted += 1

    def hold(self, receiver: str, channel: Channel, priority: int, chat_id: str = "") -> None:
        """Count a submitted delivery."""
        with self._lock:
            lane = self._open_lane(receiver, channel)
            lane.held_each[priority] += 1
            lane.chat_id = chat_id
            self._held += 1

    def release(self, receiver: str, priority: int, *, granted: bool) -> None:
        """Count the end of a submitted delivery."""
        with self._lock:
            self._lanes[receiver].held_each[priority] -= 1
            self._lanes[receiver].granted -= granted
            self._held -= 1

    def __getitem__(self, receiver: str) -> ReceiverLane:
        """Return the lane of a delivery that is held."""
        return self._lanes[receiver]

    def reserve_instant(self, receiver: str, earliest: float, priority: int) -> float:
        with self._lock:
            return self._lanes[receiver].reserve_instant(earliest, priority)

    def admit_call(self, receiver: str, now: float) -> float:
        """Return 0 if a call may start now, or the seconds that the receiver's circuit breaker still rests."""
        with self._lock:
            return self._breaker.admit(receiver, now)

    def end_call(self, receiver: str, outcome: Outcome, now: float, started_at: float) -> None:
        """Record the outcome and the duration of a call."""
        with self._lock:
            self._lanes[receiver].note_duration(now - started_at)
            self._breaker.record(receiver, outcome, now)

    def list_busy(self) -> list[LaneLoad]:
        """Return the receivers with deliveries in this process, with a rest, or with instants given ahead."""
        now = time.monotonic()
        with self._lock:
            rests = self._breaker.resting_targets(now)
            found = [
                LaneLoad(
                    key, lane.chat_id, lane.in_flight, max(lane.held - lane.in_flight, 0), round(lane.rate, 2),
                    round(rests.get(key, 0.0), 1),
                )
                for key, lane in self._lanes.items()
                if lane.held or key in rests or max(lane.next_at) > now
            ]  # fmt: skip
        return sorted(found, key=lambda each: (-each.rest, -each.held, -each.in_flight))[:REPORTED]

    def _open_lane(self, receiver: str, channel: Channel) -> ReceiverLane:
        lane = self._lanes.get(receiver)
        if lane is None:
            if len(self._lanes) >= REMEMBERED:
                # Forget the first lanes. Those that hold deliveries move to the end, so that the next call sees
                # others.
                for key in list(islice(self._lanes, FORGOTTEN_AT_ONCE)):
                    if self._lanes[key].held:
                        self._lanes.move_to_end(key)
                    else:
                        del self._lanes[key]
            lane = self._lanes[receiver] = ReceiverLane(getattr(channel, "at_once", IN_FLIGHT_PER_TARGET))
        return lane


# --- circuit breaker --------------------------------------------------------------------------------------------------


DEAD_REASONS = frozenset({"dns", "connect", "connect_timeout", "proxy", "tls", "timeout"})


def is_receiver_dead(outcome: Outcome) -> bool:
    """Return whether an outcome indicates that no receiver answers.

    Any answer, also an error, shows a live receiver.
    """
    return isinstance(outcome, (Transient, Unknown)) and outcome.reason in DEAD_REASONS


@dataclass(slots=True)
class _TargetState:
    rest: float  #: seconds after the next failure
    failures: int = 0  #: in a row
    shut_until: float = 0.0  #: seconds on the caller's clock
    on_trial: bool = False


class Breaker:
    """The circuit breakers of one process, by target. `now` is monotonic seconds. Not thread-safe.

    An admitted attempt without a recorded outcome costs only the first, short rest. A half-open trial delays the next
    trial by that rest. The rest is longer than any call, so a failed trial is recorded before it ends.
    """

    def __init__(self, failures: int = 5, rest: float = 30.0, longest: float = 600.0, remember: int = 10_000) -> None:
        self._limit = failures
        self._rest = rest
        self._longest = longest
        self._remember = remember  # targets; the one with the oldest last failure is dropped first
        self._rows: OrderedDict[str, _TargetState] = OrderedDict()

    def admit(self, target_key: str, now: float) -> float:
        """Return 0 if an attempt may start now, else the seconds to wait.

        The first attempt after a rest is the trial.
        """
        row = self._rows.get(target_key)
        if row is None or row.failures < self._limit:
            return 0.0
        if now < row.shut_until:
            return row.shut_until - now
        row.shut_until = now + self._rest
        row.on_trial = True
        return 0.0

    def remaining_rest(self, target_key: str, now: float, *, trials: int) -> float:
        """Return 0 if an attempt could start now, else the seconds to wait. Changes nothing.

        After a rest only one attempt can start: none if the caller already has `trials`.
        """
        row = self._rows.get(target_key)
        if row is None or row.failures < self._limit:
            return 0.0
        return max(row.shut_until - now, self._rest if trials else 0.0)

    def record(self, target_key: str, outcome: Outcome, now: float) -> None:
        """Count a failure, or reset the target's failures after any answer."""
        if not is_receiver_dead(outcome):
            self._rows.pop(target_key, None)
            return
        row = self._rows.setdefault(target_key, _TargetState(self._rest))
        self._rows.move_to_end(target_key)
        row.failures += 1
        if row.on_trial:  # failures of calls that were already in flight add no information
            row.rest, row.on_trial = min(row.rest * 2, self._longest), False
        row.shut_until = now + row.rest
        if len(self._rows) > self._remember:
            self._rows.popitem(last=False)

    def resting_targets(self, now: float) -> dict[str, float]:
        """Return the resting targets with their remaining seconds, for metrics and the dashboard."""
        return {
            key: row.shut_until - now
            for key, row in self._rows.items()
            if row.failures >= self._limit and row.shut_until > now
        }


# --- reports ----------------------------------------------------------------------------------------------------------


PROCESSES = "at:receivers"  #: set of the processes that report; each has a key of its own
INTERVAL = 2.0  #: seconds between reports
REPORT_LIFETIME = 10.0  #: seconds


def report_lanes(lanes: ReceiverLanes) -> None:
    """Report the lanes of this process until it ends. A process without busy lanes writes nothing."""
    name, reported = f"{socket.gethostname()}:{os.getpid()}", False
    while True:
        time.sleep(INTERVAL)
        found = lanes.list_busy()
        try:
            if found or reported:
                send_lane_report(name, found)
            reported = bool(found)
        except RedisError as error:
            log.info("receivers_not_reported", error=str(error))


def send_lane_report(process: str, found: Iterable[LaneLoad]) -> None:
    """Replace the report of a process. Raises `RedisError`."""
    with connect_once(settings.REDIS_URL).pipeline(transaction=False) as pipe:
        pipe.sadd(PROCESSES, process)
        pipe.set(f"{PROCESSES}:{process}", json.dumps(list(found)), px=int(REPORT_LIFETIME * 1000))
        pipe.execute()


def read_receiver_loads() -> dict[str, LaneLoad]:
    """Return the sum of the reports of the last `REPORT_LIFETIME`, by receiver. Raises `RedisError`."""
    client = connect_once(settings.REDIS_URL)
    members: Any = client.smembers(PROCESSES)
    processes = sorted(each.decode() for each in members)
    if not processes:
        return {}
    texts: Any = client.mget([f"{PROCESSES}:{each}" for each in processes])
    if gone := [each for each, text in zip(processes, texts, strict=True) if text is None]:
        client.srem(PROCESSES, *gone)
    loads: dict[str, LaneLoad] = {}
    for own in (LaneLoad(*each) for text in texts if text for each in json.loads(text)):
        known = loads.get(own.receiver)
        loads[own.receiver] = _add_loads(known, own) if known else own
    return loads


def _add_loads(known: LaneLoad, own: LaneLoad) -> LaneLoad:
    return known._replace(
        chat_id=known.chat_id or own.chat_id,
        in_flight=known.in_flight + own.in_flight,
        held=known.held + own.held,
        rate=known.rate + own.rate,
        rest=max(known.rest, own.rest),
    )
