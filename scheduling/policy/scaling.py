"""Decide how many workers, execution nodes and watchers are wanted. Load and time are parameters.

A need rises at once. The wanted number falls only after the need was lower for a whole span, by the database's clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BUSY_GOAL = 0.7  #: share of processes or slots that may be busy: above it queues grow quickly
IDLE_SHARE = 0.5  #: below this share of busy processes a backlog has another cause, so more of them do not help


@dataclass(frozen=True, slots=True)
class Need:
    """The number that a measurement alone asks for, with its reason."""

    count: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class DueWork:
    """Due work of one priority that nothing has started."""

    count: int = 0
    oldest: float = 0.0  #: seconds since the first was due


# --- workers ------------------------------------------------------------------------------------------------------

TOUCH_LATE = (1.0, 3.0, 60.0)  #: seconds by priority that a due touch may wait
TOUCH_DRAIN = (5.0, 30.0, 300.0)  #: seconds by priority in which due touches should be done
#: touches a second of a busy worker whose speed is unknown: two processes with 200 open requests of 0.8 s each
ASSUMED_SPEED = 500.0
SLOWEST = 0.001  #: touches a second of a measured worker


@dataclass(frozen=True, slots=True)
class WorkerDemand:
    running: int
    busy: float  #: share of the processes that run a task
    settled: float  #: touches a second of all workers
    due: Sequence[DueWork]  #: by priority


def compute_needed_workers(seen: WorkerDemand) -> Need:
    """Compute the workers that this load needs, without limits. Rises with the backlog at a given speed."""
    running, is_measured = max(seen.running, 1), seen.busy >= IDLE_SHARE and seen.settled > 0
    speed = max(seen.settled / (running * seen.busy), SLOWEST) if is_measured else ASSUMED_SPEED
    backlog = _round_count(sum(due.count / span for due, span in zip(seen.due, TOUCH_DRAIN, strict=True)) / speed)
    late = _longest_wait(seen.due, TOUCH_LATE)
    return _largest(
        Need(_round_count(running * seen.busy / BUSY_GOAL), "busy", f"{seen.busy:.0%} of the processes are busy"),
        Need(
            min(backlog, running) if seen.running and seen.busy < IDLE_SHARE else backlog,
            "backlog", f"{sum(due.count for due in seen.due)} touches are due at {speed:.0f} a second for each worker",
        ),
        Need(2 * running if late and seen.busy >= BUSY_GOAL else 0, "late", f"a due touch has waited {late:.1f} s"),
    )  # fmt: skip


# --- execution nodes ----------------------------------------------------------------------------------------------

RUN_LATE = (10.0, 60.0, 600.0)  #: seconds by priority that a job may wait while its shop is free
RUN_DRAIN = (60.0, 300.0, 900.0)  #: seconds by priority in which jobs of free shops should have started


@dataclass(frozen=True, slots=True)
class NodeDemand:
    running: int
    slots: float  #: of one node
    busy: int  #: running jobs
    run_seconds: float  #: mean duration of a run
    startable: Sequence[DueWork]  #: free shops with a due job, by the priority of that job


def compute_needed_nodes(seen: NodeDemand) -> Need:
    """Compute the nodes that these jobs need, without limits. A shop runs one job at a time."""
    running, slots = max(seen.running, 1), max(seen.slots, 1.0)
    shops = sum(due.count for due in seen.startable)
    work = sum(due.count * seen.run_seconds / span for due, span in zip(seen.startable, RUN_DRAIN, strict=True))
    most = _round_count((seen.busy + shops) / slots)
    backlog = min(most, _round_count((seen.busy + math.ceil(work)) / slots))
    share, late = seen.busy / (running * slots), _longest_wait(seen.startable, RUN_LATE)
    return _largest(
        Need(_round_count(seen.busy / (slots * BUSY_GOAL)), "busy", f"{seen.busy} jobs run at {slots:g} slots a node"),
        Need(
            min(backlog, running) if seen.running and share < IDLE_SHARE else backlog,
            "backlog", f"{shops} free shops have a due job; a run takes {seen.run_seconds:.0f} s",
        ),
        Need(
            min(2 * running, most) if late and share >= BUSY_GOAL else 0,
            "late", f"a due job has waited {late:.0f} s",
        ),
    )  # fmt: skip


# --- watchers -----------------------------------------------------------------------------------------------------

SILENCE_LATE = 2.0  #: seconds; a watcher sleeps at most one
SILENCE_SPAN = 60.0  #: seconds in which all live chats may fall silent


@dataclass(frozen=True, slots=True)
class WatcherDemand:
    running: int
    limit: float  #: silences a second that one watcher records
    silences: float  #: a second, over the last minute
    live: int  #: chats with a timer
    lag: float  #: seconds since the oldest deadline that no watcher has claimed
    holds_back: bool  #: too many guide messages are undelivered, so more watchers would wait too


def compute_needed_watchers(seen: WatcherDemand) -> Need:
    """Compute the watchers that these chats need, without limits."""
    speed = seen.limit * BUSY_GOAL
    is_late = seen.lag > SILENCE_LATE and not seen.holds_back
    return _largest(
        Need(_round_count(seen.silences / speed), "busy", f"{seen.silences:.0f} silences a second"),
        Need(_round_count(seen.live / (SILENCE_SPAN * speed)), "live", f"{seen.live} chats have a timer"),
        Need(2 * max(seen.running, 1) if is_late else 0, "late", f"a silence is {seen.lag:.1f} s late"),
    )


# --- the wanted number --------------------------------------------------------------------------------------------

#: Instants in seconds with the need at that time, oldest first. Each is lower than the one before.
Memory = tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    minimum: int
    maximum: int
    hold: float  #: seconds of a lower need before the wanted number falls


@dataclass(frozen=True, slots=True)
class Scale:
    """The answer for one kind of process. `None` means that a source did not answer: keep what runs."""

    running: int | None
    wanted: int | None
    minimum: int
    maximum: int
    code: str
    text: str


def settle_wanted(need: Need, running: int, memory: Memory, limits: Limits, now: float) -> tuple[Scale, Memory]:
    """Return the wanted number and the new memory: the largest need of the last `hold` seconds, within the limits.

    Without any memory the running number counts as needed until now: a lost memory removes nothing early. Of an older
    memory only the latest need counts, so that a program that asks rarely also sees the number fall.
    """
    count = _limit_count(need.count, limits)
    known = [(min(at, now), _limit_count(was, limits)) for at, was in memory if now - at < limits.hold]
    if not known:
        known = [(now, _limit_count(memory[-1][1] if memory else running, limits))]
    kept = (*((at, was) for at, was in known if was > count), (now, count))
    wanted = kept[0][1]
    code, text = need.code, need.text
    if wanted > count:
        code, text = "held", f"{count} needed now, {wanted} within the last {limits.hold:.0f} s"
    elif need.count > limits.maximum:
        code, text = "maximum", f"{need.count} needed: {text}"
    elif need.count < limits.minimum:
        code, text = "minimum", f"{need.count} needed: {text}"
    return Scale(running, wanted, limits.minimum, limits.maximum, code, text), kept


def _limit_count(count: int, limits: Limits) -> int:
    return min(max(count, limits.minimum), limits.maximum)


def _largest(*needs: Need) -> Need:
    return max(needs, key=lambda need: need.count)


def _longest_wait(due: Sequence[DueWork], allowed: Sequence[float]) -> float:
    """Return the longest wait in seconds among those that exceed what their priority allows; 0 without one."""
    return max((each.oldest for each, limit in zip(due, allowed, strict=True) if each.oldest > limit), default=0.0)


def _round_count(value: float) -> int:
    return math.ceil(value - 1e-9)
