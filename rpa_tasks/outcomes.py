"""PURE. How a run ended → what it means for the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

DEFAULT_DELAYS = (30.0, 60.0, 120.0)
#: At most this share on top of a delay, so that many shops that failed together do not come back together. It never
#: exceeds the longest delay, which is the cap.
JITTER = 0.1


class Outcome(StrEnum):
    """The values of `Run.Outcome`, for those who may not import Django."""

    SUCCEEDED = "succeeded"
    TRANSIENT = "transient"
    BUSINESS = "business"
    SESSION = "session"
    PLATFORM = "platform"
    HELD = "held"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class Ended(StrEnum):
    """Why a command came to its end."""

    EXITED = "exited"  #: by itself, be it by a signal that was not ours
    TIMEOUT = "timeout"
    LEASE_LOST = "lease_lost"  #: the runner extended nothing in time
    CANCELLED = "cancelled"
    NODE_STOPPING = "node_stopping"
    RUNNER_LOST = "runner_lost"  #: the runner's end of the pipe was closed
    NOT_STARTED = "not_started"  #: nothing of it ever ran
    GUARD_LOST = "guard_lost"  #: the guard itself was killed


@dataclass(frozen=True, slots=True)
class Ending:
    """The last that is known of a command. When it is reported, nothing of it is alive, except `survivors`."""

    ended: Ended
    exit: int | None = None
    signal: int | None = None
    #: A word: why it was not started, or what was wrong with its result.
    error: str = ""
    #: How many of its processes could not be proven dead: its browser must not be used again.
    survivors: int = 0
    #: The last of its output, at most 8,000 characters, secrets masked.
    tail: str = ""
    #: Bytes of output that the log did not keep.
    dropped: int = 0
    result: dict[str, Any] | None = None
    #: The program was entered: it may have had its effect.
    started: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    reason: str = ""


#: What the exit status means where a flow has no table of its own.
DEFAULT_EXIT_CODES: Mapping[str, Sequence[int]] = {"business": (64, 65), "session": (77,), "platform": (75,)}
#: Why a command was not started that no repeat would cure.
HOPELESS = frozenset({"command_missing", "command_not_executable", "arguments_too_long"})


def judge(ending: Ending, *, exit_codes: Mapping[str, Sequence[int]], idempotent: bool, needs_result: bool) -> Verdict:
    """What becomes of the job. Where it is open whether the effect took place, only an idempotent flow is tried again.

    `exit_codes` are the flow's own by outcome; empty means 65 business, 77 session, 75 platform.
    """
    listed = _listed(ending.exit, exit_codes or DEFAULT_EXIT_CODES)
    verdict = _judge(ending, listed, Outcome.TRANSIENT if idempotent else Outcome.UNKNOWN, needs_result)
    if ending.survivors:
        return Verdict(verdict.outcome, f"{verdict.reason}+survivors".lstrip("+"))
    return verdict


def retry_delay(failures: int, delays: Sequence[float], jitter: Callable[[], float]) -> timedelta | None:
    """How long to wait after the `failures`-th failure, counted from 1. None: all tries are used up.

    `delays` are seconds, one for each retry. `jitter` gives 0 to 1, like `random.random`.
    """
    if failures > len(delays):
        return None
    delay = delays[max(failures, 1) - 1] * (1 + JITTER * jitter())
    return timedelta(seconds=min(delay, max(delays)))


def _judge(ending: Ending, listed: Outcome | None, open_end: Outcome, needs_result: bool) -> Verdict:
    if ending.ended is Ended.CANCELLED:
        return Verdict(Outcome.CANCELLED, "cancelled")
    if ending.ended is Ended.NOT_STARTED:
        hopeless = ending.error in HOPELESS
        return Verdict(Outcome.BUSINESS if hopeless else Outcome.TRANSIENT, ending.error or "not_started")
    if listed is not None:
        return Verdict(listed, f"exit_{ending.exit}")
    if ending.ended is Ended.EXITED:
        return _judge_exit(ending, open_end, needs_result)
    if ending.exit == 0 and ending.result is not None:
        return Verdict(Outcome.SUCCEEDED)  # it had its result before it heard that it should end
    if ending.ended is Ended.NODE_STOPPING and open_end is Outcome.TRANSIENT:
        return Verdict(Outcome.HELD, "node_stopping")
    return Verdict(open_end, ending.ended.value)


def _judge_exit(ending: Ending, open_end: Outcome, needs_result: bool) -> Verdict:
    if ending.signal is not None:
        return Verdict(open_end, f"signal_{ending.signal}")
    if ending.exit != 0:
        return Verdict(open_end, f"exit_{ending.exit}")
    if needs_result and ending.result is None:
        return Verdict(Outcome.BUSINESS, ending.error or "no_result")
    return Verdict(Outcome.SUCCEEDED, ending.error)


def _listed(code: int | None, exit_codes: Mapping[str, Sequence[int]]) -> Outcome | None:
    """The first outcome in the table that names this exit status."""
    return next((Outcome(outcome) for outcome, codes in exit_codes.items() if code in codes), None)
