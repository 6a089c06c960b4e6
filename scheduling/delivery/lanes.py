"""Know the receivers of this process: who has room, who does not answer, and when each takes its next touch.

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
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import structlog
from django.conf import settings

from scheduling.channels.base import Channel, Outcome, Transient, Unknown
from scheduling.delivery.outgoing import Delivery
from scheduling.models.touch import Priority
from scheduling.redis_client import RedisError, connect_once

log = structlog.get_logger(__name__)


# --- lanes ------------------------------------------------------------------------------------------------------------


IN_FLIGHT_PER_TARGET = 200  #: unless the channel sets `at_once`
#: Deliveries that a process holds. Beyond it a receiver gets only `SMALL_SHARE`, up to twice as many.
IN_FLIGHT = 10_000
SMALL_SHARE = 20
#: Seconds of a receiver's work that its lane holds, or twice its calls if that is more; below `BATCH_DEADLINE`.
WORK_AHEAD = 8.0
LATE = 10.0  #: seconds before its deadline, from which a delivery goes before more important ones
FIRST_DURATION = 0.2  #: seconds, assumed of a receiver that has not answered yet; too short costs a second deferral
SHORTEST_DURATION = 0.01
SMOOTHING = 0.1  #: weight of the latest call
LONGEST_WAIT = 600.0  #: seconds; the estimate may be wrong for longer waits
REMEMBERED = 10_000  #: receivers, beside those with deliveries
FORGOTTEN_AT_ONCE = 100  #: receivers
REPORTED = 1_000  #: receivers in the report of a process: the resting ones, then the busiest

FAILURES_TO_REST = 5  #: in a row, after which the circuit breaker of a receiver rests
#: Seconds of the first rest. It is longer than any call, so a failed trial is recorded before the rest ends.
FIRST_REST = 30.0
LONGEST_REST = 600.0
DEAD_REASONS = frozenset({"dns", "connect", "connect_timeout", "proxy", "tls", "timeout"})


def is_receiver_dead(outcome: Outcome) -> bool:
    """Return whether an outcome indicates that no receiver answers.

    Any answer, also an error, shows a live receiver.
    """
    return isinstance(outcome, (Transient, Unknown)) and outcome.reason in DEAD_REASONS


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
    """The deliveries of this process to one receiver, how fast it takes them, and its circuit breaker.

    Times are monotonic seconds. An admitted call without a recorded outcome costs only the first, short rest. A
    half-open trial delays the next trial by that rest.
    """

    limit: int  #: most calls in flight
    waiting: tuple[deque[Delivery], ...] = field(default_factory=lambda: tuple(deque() for _ in Priority))
    in_flight: int = 0
    held_each: list[int] = field(default_factory=lambda: [0] * len(Priority))  #: submitted, not ended; by priority
    granted: int = 0  #: of these, how many have a grant of the vendor's quota
    duration: float = 0.0  #: smoothed seconds in flight; 0: no call has ended
    chat_id: str = ""  #: of the latest delivery
    next_at: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  #: last instant given, by priority
    failures: int = 0  #: in a row
    rest: float = FIRST_REST  #: seconds after the next failure
    shut_until: float = 0.0
    on_trial: bool = False

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
        oldest = min(queues, key=lambda queue: queue[0].clock.monotonic)
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

    def admit_call(self, now: float) -> float:
        """Return 0 if a call may start now, or the seconds that the circuit breaker still rests.

        The first call after a rest is the trial.
        """
        if self.failures < FAILURES_TO_REST:
            return 0.0
        if now < self.shut_until:
            return self.shut_until - now
        self.shut_until, self.on_trial = now + FIRST_REST, True
        return 0.0

    def remaining_rest(self, now: float, *, trials: int = 0) -> float:
        """Return 0 if a call could start now, or the seconds to wait. Changes nothing.

        After a rest only one call can start: none if the caller already has `trials`.
        """
        if self.failures < FAILURES_TO_REST:
            return 0.0
        return max(self.shut_until - now, FIRST_REST if trials else 0.0)

    def record_outcome(self, outcome: Outcome, now: float) -> None:
        """Count a failure, or reset the failures after any answer."""
        if not is_receiver_dead(outcome):
            self.failures, self.rest, self.on_trial = 0, FIRST_REST, False
            return
        self.failures += 1
        if self.on_trial:  # failures of calls that were already in flight add no information
            self.rest, self.on_trial = min(self.rest * 2, LONGEST_REST), False
        self.shut_until = now + self.rest


class ReceiverLanes:
    """The lanes of a process by receiver. Thread-safe, except for `waiting` of a lane."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, ReceiverLane] = OrderedDict()
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
            rest = lane.remaining_rest(now, trials=own + lane.held)
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

    def list_held(self) -> list[str]:
        """Return the receivers with deliveries in this process."""
        with self._lock:
            return [receiver for receiver, lane in self._lanes.items() if lane.held]

    def reserve_instant(self, receiver: str, earliest: float, priority: int) -> float:
        with self._lock:
            return self._lanes[receiver].reserve_instant(earliest, priority)

    def admit_call(self, receiver: str, now: float) -> float:
        """Return 0 if a call may start now, or the seconds that the receiver's circuit breaker still rests."""
        with self._lock:
            return self._lanes[receiver].admit_call(now)

    def end_call(self, receiver: str, outcome: Outcome, now: float, started_at: float) -> None:
        """Record the outcome and the duration of a call."""
        with self._lock:
            self._lanes[receiver].note_duration(now - started_at)
            self._lanes[receiver].record_outcome(outcome, now)

    def list_busy(self) -> list[LaneLoad]:
        """Return the receivers with deliveries in this process, with a rest, or with instants given ahead."""
        now = time.monotonic()
        with self._lock:
            found = [
                LaneLoad(
                    key, lane.chat_id, lane.in_flight, max(lane.held - lane.in_flight, 0), round(lane.rate, 2),
                    round(lane.remaining_rest(now), 1),
                )
                for key, lane in self._lanes.items()
                if lane.held or lane.remaining_rest(now) or max(lane.next_at) > now
            ]  # fmt: skip
        return sorted(found, key=lambda each: (-each.rest, -each.held, -each.in_flight))[:REPORTED]

    def _open_lane(self, receiver: str, channel: Channel) -> ReceiverLane:
        lane = self._lanes.get(receiver)
        if lane is None:
            if len(self._lanes) >= REMEMBERED:
                # Forget the first lanes. Those that hold deliveries or rest move to the end, so that the next call
                # sees others.
                now = time.monotonic()
                for key in list(islice(self._lanes, FORGOTTEN_AT_ONCE)):
                    if self._lanes[key].held or self._lanes[key].remaining_rest(now):
                        self._lanes.move_to_end(key)
                    else:
                        del self._lanes[key]
            lane = self._lanes[receiver] = ReceiverLane(channel.at_once or IN_FLIGHT_PER_TARGET)
        return lane


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
        if known:
            own = known._replace(
                chat_id=known.chat_id or own.chat_id,
                in_flight=known.in_flight + own.in_flight,
                held=known.held + own.held,
                rate=known.rate + own.rate,
                rest=max(known.rest, own.rest),
            )
        loads[own.receiver] = own
    return loads
