from __future__ import annotations

from datetime import timedelta

import pytest

from rpa_tasks.models import Run
from rpa_tasks.outcomes import DEFAULT_DELAYS, CommandResult, ExitCause, RunOutcome, Verdict, judge, retry_delay

TABLE = {"transient": [1, 2], "business": [65, 66], "session": [77], "platform": [75]}


def verdict(ending: CommandResult, *, idempotent: bool = False, needs_result: bool = False) -> tuple[str, str]:
    told = judge(ending, exit_codes=TABLE, idempotent=idempotent, needs_result=needs_result)
    return told.outcome.value, told.reason


def exited(code: int | None = None, **changes: object) -> CommandResult:
    return CommandResult(ExitCause.EXITED, exit=code, started=True, **changes)  # type: ignore[arg-type]


def test_outcomes_are_those_of_a_run() -> None:
    assert {outcome.value for outcome in RunOutcome} == set(Run.Outcome.values)


def test_exit_status_0_has_succeeded() -> None:
    assert verdict(exited(0)) == ("succeeded", "")
    assert verdict(exited(0, result={}), needs_result=True) == ("succeeded", "")


def test_a_result_that_is_demanded_and_missing_is_a_failure_for_good() -> None:
    assert verdict(exited(0), needs_result=True) == ("business", "no_result")
    assert verdict(exited(0, error="result_too_long"), needs_result=True) == ("business", "result_too_long")


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize(
    ("code", "outcome"), [(1, "transient"), (65, "business"), (66, "business"), (77, "session"), (75, "platform")]
)
def test_a_listed_exit_status_says_what_it_is(code: int, outcome: str, idempotent: bool) -> None:
    assert verdict(exited(code), idempotent=idempotent) == (outcome, f"exit_{code}")


def test_without_a_table_the_usual_one_holds() -> None:
    def plain(code: int) -> str:
        return judge(exited(code), exit_codes={}, idempotent=True, needs_result=False).outcome.value

    assert [plain(code) for code in (0, 65, 77, 75, 1)] == ["succeeded", "business", "session", "platform", "transient"]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (exited(3), "exit_3"),
        (exited(signal=11), "signal_11"),
        (CommandResult(ExitCause.TIMEOUT, signal=15, started=True), "timeout"),
        (CommandResult(ExitCause.TIMEOUT, exit=0, started=True), "timeout"),  # many leave so when they are asked to go
        (CommandResult(ExitCause.TIMEOUT, exit=143, started=True), "timeout"),
        (CommandResult(ExitCause.LEASE_LOST, signal=9, started=True), "lease_lost"),
        (CommandResult(ExitCause.RUNNER_LOST, signal=15, started=True), "runner_lost"),
        (CommandResult(ExitCause.SUPERVISOR_LOST, started=True), "guard_lost"),
        (
            CommandResult(ExitCause.SUPERVISOR_LOST),
            "guard_lost",
        ),  # it may have died between the start and the news of it
    ],
)
def test_an_open_end_is_repeated_only_where_that_does_no_harm(ending: CommandResult, reason: str) -> None:
    assert verdict(ending, idempotent=True) == ("transient", reason)
    assert verdict(ending, idempotent=False) == ("unknown", reason)


def test_a_stopping_node_holds_what_can_be_repeated() -> None:
    ending = CommandResult(ExitCause.NODE_STOPPING, signal=15, started=True)
    assert verdict(ending, idempotent=True) == ("held", "node_stopping")
    assert verdict(ending, idempotent=False) == ("unknown", "node_stopping")


def test_what_was_cancelled_is_cancelled() -> None:
    assert verdict(CommandResult(ExitCause.CANCELLED, exit=75, started=True)) == ("cancelled", "cancelled")


@pytest.mark.parametrize("ended", [ExitCause.TIMEOUT, ExitCause.NODE_STOPPING, ExitCause.LEASE_LOST])
def test_what_had_its_result_before_it_was_asked_to_go_has_succeeded(ended: ExitCause) -> None:
    assert verdict(CommandResult(ended, exit=0, result={"n": 1}, started=True)) == ("succeeded", "")


def test_an_exit_status_says_what_it_is_also_after_a_stop() -> None:
    assert verdict(CommandResult(ExitCause.TIMEOUT, exit=77, started=True)) == ("session", "exit_77")


@pytest.mark.parametrize("error", ["command_missing", "command_not_executable", "arguments_too_long"])
def test_a_command_that_can_never_start_fails_for_good(error: str) -> None:
    assert verdict(CommandResult(ExitCause.NOT_STARTED, error=error), idempotent=True) == ("business", error)


@pytest.mark.parametrize("error", ["fork_failed", "directory_missing", "guard_not_started"])
def test_a_command_that_did_not_start_this_time_is_tried_again_whatever_it_does(error: str) -> None:
    assert verdict(CommandResult(ExitCause.NOT_STARTED, error=error), idempotent=False) == ("transient", error)


def test_survivors_are_told_beside_the_reason() -> None:
    assert verdict(exited(0, survivors=1)) == ("succeeded", "survivors")
    assert verdict(CommandResult(ExitCause.TIMEOUT, started=True, survivors=2)) == ("unknown", "timeout+survivors")


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("needs_result", [True, False])
@pytest.mark.parametrize("ended", ExitCause)
def test_every_ending_has_an_outcome_and_a_reason_that_fits(
    ended: ExitCause, idempotent: bool, needs_result: bool
) -> None:
    for ending in (
        CommandResult(ended),
        CommandResult(ended, exit=0, result={}),
        CommandResult(ended, signal=64, survivors=1),
    ):
        told = judge(ending, exit_codes={}, idempotent=idempotent, needs_result=needs_result)
        assert isinstance(told, Verdict)
        assert len(told.reason) <= 64


def test_retries_wait_30_60_and_120_seconds_and_then_there_are_none() -> None:
    waits = [retry_delay(failures, DEFAULT_DELAYS, lambda: 0.0) for failures in (1, 2, 3, 4)]
    assert waits == [timedelta(seconds=30), timedelta(seconds=60), timedelta(seconds=120), None]


def test_jitter_only_adds_and_a_tenth_at_most() -> None:
    assert retry_delay(2, [1, 50, 100], lambda: 1.0) == timedelta(seconds=55)


def test_retry_delay_jitter_never_exceeds_the_longest_delay() -> None:
    assert [retry_delay(n, DEFAULT_DELAYS, lambda: 1.0) for n in (1, 2, 3)] == [
        timedelta(seconds=33), timedelta(seconds=66), timedelta(seconds=120)
    ]  # fmt: skip
    assert retry_delay(1, [115, 120], lambda: 1.0) == timedelta(seconds=120)
    assert retry_delay(2, [1, 50, 100], lambda: 0.5) == timedelta(seconds=52.5)
    assert retry_delay(3, [1, 50], lambda: 0.5) is None
