"""PURE. Judge the end of a run and compute the delay of a retry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

DEFAULT_DELAYS = (30.0, 60.0, 120.0)
#: Largest share added to a delay, so that shops that failed together do not retry together. What would exceed the
#: longest delay is subtracted from it instead: that delay is the cap.
JITTER = 0.1


class RunOutcome(StrEnum):
    """How one run of a job ended."""

    SUCCEEDED = "succeeded"
    TRANSIENT = "transient"
    BUSINESS = "business"
    SESSION = "session"
    PLATFORM = "platform"
    DEFERRED = "held"  #: no browser in time, or the node was stopping
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class ExitCause(StrEnum):
    """Why a command ended."""

    EXITED = "exited"  #: by itself, or by a signal from another process
    TIMEOUT = "timeout"
    LEASE_LOST = "lease_lost"  #: no extension from the runner in time
    CANCELLED = "cancelled"
    NODE_STOPPING = "node_stopping"
    RUNNER_LOST = "runner_lost"  #: the runner's end of the pipe was closed
    NOT_STARTED = "not_started"  #: no part of it ran
    SUPERVISOR_LOST = "supervisor_lost"  #: the supervisor process itself was killed


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Final report on a command. All its processes have ended, except `survivors`."""

    ended: ExitCause
    exit: int | None = None
    signal: int | None = None
    #: Code: why it was not started, or why its result was rejected.
    error: str = ""
    #: Processes whose end is not proven; if there are any, the browser must not be used again.
    survivors: int = 0
    #: End of its output, at most 8,000 characters, secrets masked.
    tail: str = ""
    result: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: RunOutcome
    reason: str = ""


#: Meaning of the exit status. A flow's own table adds to it and may give these numbers another meaning.
DEFAULT_EXIT_CODES: Mapping[str, Sequence[int]] = {"business": (64, 65), "session": (77,), "platform": (75,)}
#: Statuses of programs that report how another program was stopped: `timeout`, and shells with 128 + a signal number.
STOPPED_EXIT_CODES = frozenset({124, *range(129, 193)})
#: Reasons for a failed start that no retry can repair.
PERMANENT_START_ERRORS = frozenset({"command_missing", "command_not_executable", "arguments_too_long"})


def judge(
    ending: CommandResult, *, exit_codes: Mapping[str, Sequence[int]], idempotent: bool, needs_result: bool
) -> Verdict:
    """Return the verdict on the job. A command that ends with an error is tried again.

    After an uncertain end (killed, timeout, vanished) only an idempotent flow is tried again; otherwise the outcome is
    unknown. `exit_codes` are the flow's own by outcome; they precede `DEFAULT_EXIT_CODES`.
    """
    # The outcome of this exit status in the flow's table, otherwise in the default one.
    tables = (exit_codes, DEFAULT_EXIT_CODES)
    listed = next((RunOutcome(name) for table in tables for name, codes in table.items() if ending.exit in codes), None)
    verdict = _judge_cause(ending, listed, RunOutcome.TRANSIENT if idempotent else RunOutcome.UNKNOWN, needs_result)
    if ending.survivors:
        return Verdict(verdict.outcome, f"{verdict.reason}+survivors".lstrip("+"))
    return verdict


def retry_delay(failures: int, delays: Sequence[float], jitter: Callable[[], float]) -> timedelta | None:
    """Return the delay after the `failures`-th failure, counted from 1. None: all retries are used up.

    `delays` are seconds, one per retry. `jitter` returns 0 to 1, like `random.random`.
    """
    if failures > len(delays):
        return None
    delay, cap = delays[max(failures, 1) - 1] * (1 + JITTER * jitter()), max(delays)
    return timedelta(seconds=2 * cap - delay if delay > cap else delay)


def _judge_cause(ending: CommandResult, listed: RunOutcome | None, open_end: RunOutcome, needs_result: bool) -> Verdict:
    has_result = ending.exit == 0 and ending.result is not None  # a stop that follows does not change that
    if ending.ended is ExitCause.CANCELLED and not has_result:
        return Verdict(RunOutcome.CANCELLED, "cancelled")
    if ending.ended is ExitCause.NOT_STARTED:
        hopeless = ending.error in PERMANENT_START_ERRORS
        return Verdict(RunOutcome.BUSINESS if hopeless else RunOutcome.TRANSIENT, ending.error or "not_started")
    if listed is not None:
        return Verdict(listed, f"exit_{ending.exit}")
    if ending.ended is ExitCause.EXITED:
        return _judge_exit(ending, open_end, needs_result)
    if has_result:
        return Verdict(RunOutcome.SUCCEEDED)
    if ending.ended is ExitCause.NODE_STOPPING and open_end is RunOutcome.TRANSIENT:
        return Verdict(RunOutcome.DEFERRED, "node_stopping")
    return Verdict(open_end, ending.ended.value)


def _judge_exit(ending: CommandResult, open_end: RunOutcome, needs_result: bool) -> Verdict:
    if ending.signal is not None:
        return Verdict(open_end, f"signal_{ending.signal}")
    if ending.exit in STOPPED_EXIT_CODES:
        return Verdict(open_end, f"exit_{ending.exit}")
    if ending.exit != 0:
        return Verdict(RunOutcome.TRANSIENT, f"exit_{ending.exit}")
    if needs_result and ending.result is None:
        return Verdict(RunOutcome.BUSINESS, ending.error or "no_result")
    return Verdict(RunOutcome.SUCCEEDED, ending.error)
