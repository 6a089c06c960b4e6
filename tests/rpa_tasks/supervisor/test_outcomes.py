from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any

from rpa_tasks.outcomes import (
    DEFAULT_DELAYS,
    PERMANENT_START_ERRORS,
    CommandResult,
    ExitCause,
    judge,
    retry_delay,
)

TABLE = {"transient": [1, 2], "business": [65, 66], "session": [77], "platform": [75]}


def run(ended: ExitCause, code: int | None = None, **changes: Any) -> CommandResult:
    return CommandResult(ended, exit=code, **changes)


def exited(code: int | None = None, **changes: Any) -> CommandResult:
    return run(ExitCause.EXITED, code, **changes)


def not_started(error: str) -> CommandResult:
    return CommandResult(ExitCause.NOT_STARTED, error=error)


#: The verdict for an idempotent flow, and for another one where it differs.
VERDICTS: list[tuple[CommandResult, str, str]] = [
    (exited(0), "succeeded", ""),
    *((exited(code), f"transient exit_{code}", "") for code in (1, 3, 70, 126, 193, 255)),
    *((exited(code), f"business exit_{code}", "") for code in (64, 65, 66)),
    (exited(77), "session exit_77", ""),
    (exited(75), "platform exit_75", ""),
    # Nobody knows what happened before the end.
    (exited(124), "transient exit_124", "unknown exit_124"),  # of timeout(1)
    (exited(137), "transient exit_137", "unknown exit_137"),  # of a shell whose program was killed
    (exited(signal=11), "transient signal_11", "unknown signal_11"),
    (run(ExitCause.TIMEOUT, signal=15), "transient timeout", "unknown timeout"),
    (run(ExitCause.TIMEOUT, 0), "transient timeout", "unknown timeout"),  # many leave so when they are asked to go
    (run(ExitCause.TIMEOUT, 143), "transient timeout", "unknown timeout"),
    (run(ExitCause.TIMEOUT, survivors=2), "transient timeout+survivors", "unknown timeout+survivors"),
    (run(ExitCause.LEASE_LOST, signal=9), "transient lease_lost", "unknown lease_lost"),
    (run(ExitCause.RUNNER_LOST, signal=15), "transient runner_lost", "unknown runner_lost"),
    (run(ExitCause.SUPERVISOR_LOST), "transient supervisor_lost", "unknown supervisor_lost"),
    (run(ExitCause.NODE_STOPPING, signal=15), "held node_stopping", "unknown node_stopping"),
    (run(ExitCause.CANCELLED, 75), "cancelled cancelled", ""),
    # A result, and a listed exit status, count although the command was asked to end.
    *((run(ended, 0, result={"n": 1}), "succeeded", "") for ended in ExitCause if ended is not ExitCause.NOT_STARTED),
    (run(ExitCause.TIMEOUT, 77), "session exit_77", ""),
    *((not_started(error), f"business {error}", "") for error in sorted(PERMANENT_START_ERRORS)),
    *((not_started(error), f"transient {error}", "") for error in ("fork_failed", "directory_missing", "lease_lost")),
    (exited(0, survivors=1), "succeeded survivors", ""),
]


def verdict(ending: CommandResult, *, idempotent: bool = False, needs_result: bool = False) -> str:
    told = judge(ending, exit_codes=TABLE, idempotent=idempotent, needs_result=needs_result)
    return f"{told.outcome.value} {told.reason}".strip()


def test_end_of_a_command_has_its_verdict() -> None:
    told = [(ending, verdict(ending, idempotent=True), verdict(ending)) for ending, *_ in VERDICTS]
    assert told == [(ending, repeatable, other or repeatable) for ending, repeatable, other in VERDICTS]


def test_missing_required_result_fails_as_business() -> None:
    assert verdict(exited(0, result={}), needs_result=True) == "succeeded"
    assert verdict(exited(0), needs_result=True) == "business no_result"
    assert verdict(exited(0, error="result_too_long"), needs_result=True) == "business result_too_long"


def test_exit_codes_of_flow_add_to_defaults() -> None:
    def judge_exits(exit_codes: dict[str, list[int]], *codes: int) -> list[str]:
        ends = [judge(exited(code), exit_codes=exit_codes, idempotent=False, needs_result=False) for code in codes]
        return [end.outcome.value for end in ends]

    assert judge_exits({}, 0, 64, 77, 75, 1) == ["succeeded", "business", "session", "platform", "transient"]
    own = {"business": [3], "transient": [75, 124]}  # the second has another meaning by default
    assert judge_exits(own, 3, 64, 77, 75, 124) == ["business", "business", "session", "transient", "transient"]


def test_reason_of_each_end_fits_its_column() -> None:
    endings = ({}, {"exit": 0, "result": {}}, {"signal": 64, "survivors": 1})
    for ended, changes, idempotent, needs_result in product(ExitCause, endings, (True, False), (True, False)):
        ending = CommandResult(ended, **changes)  # type: ignore[arg-type]
        told = judge(ending, exit_codes={}, idempotent=idempotent, needs_result=needs_result)
        assert len(told.reason) <= 64


def test_retry_delays_grow_by_jitter_up_to_the_longest() -> None:
    """What would exceed it is subtracted, so shops that failed together stay apart at the cap too."""
    expected = {
        0.0: [30, 60, 120, None],
        0.5: [31.5, 63, 114, None],
        1.0: [33, 66, 108, None],
    }
    found = {
        jitter: [retry_delay(failures, DEFAULT_DELAYS, lambda: jitter) for failures in (1, 2, 3, 4)]  # noqa: B023
        for jitter in expected
    }
    assert found == {
        jitter: [None if delay is None else timedelta(seconds=delay) for delay in delays]
        for jitter, delays in expected.items()
    }
    assert retry_delay(1, [115, 120], lambda: 1.0) == timedelta(seconds=113.5)
    assert retry_delay(1, [60], lambda: 0.5) == timedelta(seconds=57)
