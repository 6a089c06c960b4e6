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


def test_run_outcomes_match_model_choices() -> None:
    assert {outcome.value for outcome in RunOutcome} == set(Run.Outcome.values)


def test_exit_status_zero_succeeds() -> None:
    assert verdict(exited(0)) == ("succeeded", "")
    assert verdict(exited(0, result={}), needs_result=True) == ("succeeded", "")


def test_missing_required_result_fails_as_business() -> None:
    assert verdict(exited(0), needs_result=True) == ("business", "no_result")
    assert verdict(exited(0, error="result_too_long"), needs_result=True) == ("business", "result_too_long")


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize(
    ("code", "outcome"), [(1, "transient"), (65, "business"), (66, "business"), (77, "session"), (75, "platform")]
)
def test_listed_exit_status_sets_outcome(code: int, outcome: str, idempotent: bool) -> None:
    assert verdict(exited(code), idempotent=idempotent) == (outcome, f"exit_{code}")


def test_default_exit_codes_set_outcome() -> None:
    def plain(code: int) -> str:
        return judge(exited(code), exit_codes={}, idempotent=True, needs_result=False).outcome.value

    assert [plain(code) for code in (0, 65, 77, 75, 1)] == ["succeeded", "business", "session", "platform", "transient"]


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("code", [3, 70, 126, 193, 255])
def test_exit_with_error_is_transient_for_every_flow(code: int, idempotent: bool) -> None:
    assert verdict(exited(code), idempotent=idempotent) == ("transient", f"exit_{code}")


def test_exit_codes_of_flow_add_to_defaults() -> None:
    def plain(code: int) -> str:
        codes = {"business": [3], "transient": [75, 124]}
        return judge(exited(code), exit_codes=codes, idempotent=False, needs_result=False).outcome.value

    assert [plain(code) for code in (3, 64, 65, 77)] == ["business", "business", "business", "session"]
    assert [plain(code) for code in (75, 124)] == ["transient", "transient"]  # the flow's own meaning


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (exited(124), "exit_124"),  # of timeout(1)
        (exited(137), "exit_137"),  # of a shell whose program was killed
        (exited(signal=11), "signal_11"),
        (CommandResult(ExitCause.TIMEOUT, signal=15, started=True), "timeout"),
        (CommandResult(ExitCause.TIMEOUT, exit=0, started=True), "timeout"),  # many leave so when they are asked to go
        (CommandResult(ExitCause.TIMEOUT, exit=143, started=True), "timeout"),
        (CommandResult(ExitCause.LEASE_LOST, signal=9, started=True), "lease_lost"),
        (CommandResult(ExitCause.RUNNER_LOST, signal=15, started=True), "runner_lost"),
        (CommandResult(ExitCause.SUPERVISOR_LOST, started=True), "supervisor_lost"),
        (
            CommandResult(ExitCause.SUPERVISOR_LOST),
            "supervisor_lost",
        ),  # it may have died between the start and the news of it
    ],
)
def test_unclear_end_is_transient_only_if_idempotent(ending: CommandResult, reason: str) -> None:
    assert verdict(ending, idempotent=True) == ("transient", reason)
    assert verdict(ending, idempotent=False) == ("unknown", reason)


def test_stopping_node_defers_only_idempotent_run() -> None:
    ending = CommandResult(ExitCause.NODE_STOPPING, signal=15, started=True)
    assert verdict(ending, idempotent=True) == ("held", "node_stopping")
    assert verdict(ending, idempotent=False) == ("unknown", "node_stopping")


def test_cancelled_run_has_outcome_cancelled() -> None:
    assert verdict(CommandResult(ExitCause.CANCELLED, exit=75, started=True)) == ("cancelled", "cancelled")


STOPS = [ExitCause.TIMEOUT, ExitCause.NODE_STOPPING, ExitCause.LEASE_LOST, ExitCause.CANCELLED]


@pytest.mark.parametrize("ended", STOPS)
def test_result_before_stop_succeeds(ended: ExitCause) -> None:
    assert verdict(CommandResult(ended, exit=0, result={"n": 1}, started=True)) == ("succeeded", "")


def test_exit_status_after_stop_keeps_its_meaning() -> None:
    assert verdict(CommandResult(ExitCause.TIMEOUT, exit=77, started=True)) == ("session", "exit_77")


@pytest.mark.parametrize("error", ["command_missing", "command_not_executable", "arguments_too_long"])
def test_command_that_cannot_start_fails_as_business(error: str) -> None:
    assert verdict(CommandResult(ExitCause.NOT_STARTED, error=error), idempotent=True) == ("business", error)


@pytest.mark.parametrize("error", ["fork_failed", "directory_missing", "supervisor_not_started"])
def test_temporary_start_failure_is_transient(error: str) -> None:
    assert verdict(CommandResult(ExitCause.NOT_STARTED, error=error), idempotent=False) == ("transient", error)


def test_survivors_are_added_to_reason() -> None:
    assert verdict(exited(0, survivors=1)) == ("succeeded", "survivors")
    assert verdict(CommandResult(ExitCause.TIMEOUT, started=True, survivors=2)) == ("unknown", "timeout+survivors")


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("needs_result", [True, False])
@pytest.mark.parametrize("ended", ExitCause)
def test_judge_covers_every_result(ended: ExitCause, idempotent: bool, needs_result: bool) -> None:
    for ending in (
        CommandResult(ended),
        CommandResult(ended, exit=0, result={}),
        CommandResult(ended, signal=64, survivors=1),
    ):
        told = judge(ending, exit_codes={}, idempotent=idempotent, needs_result=needs_result)
        assert isinstance(told, Verdict)
        assert len(told.reason) <= 64


def test_retry_delay_follows_default_delays() -> None:
    waits = [retry_delay(failures, DEFAULT_DELAYS, lambda: 0.0) for failures in (1, 2, 3, 4)]
    assert waits == [timedelta(seconds=30), timedelta(seconds=60), timedelta(seconds=120), None]


def test_retry_jitter_adds_at_most_a_tenth() -> None:
    assert retry_delay(2, [1, 50, 100], lambda: 1.0) == timedelta(seconds=55)


def test_retry_jitter_is_capped_by_longest_delay() -> None:
    assert [retry_delay(n, DEFAULT_DELAYS, lambda: 1.0) for n in (1, 2, 3)] == [
        timedelta(seconds=33), timedelta(seconds=66), timedelta(seconds=108)
    ]  # fmt: skip
    assert retry_delay(1, [115, 120], lambda: 1.0) == timedelta(seconds=113.5)


def test_retry_jitter_spreads_shops_at_the_cap() -> None:
    waits = {retry_delay(3, DEFAULT_DELAYS, lambda share=share: share / 50) for share in range(51)}
    assert (min(waits), max(waits), len(waits)) == (timedelta(seconds=108), timedelta(seconds=120), 51)
    assert retry_delay(1, [60], lambda: 0.5) == timedelta(seconds=57)


def test_retry_delay_ends_after_last_delay() -> None:
    assert retry_delay(2, [1, 50, 100], lambda: 0.5) == timedelta(seconds=52.5)
    assert retry_delay(3, [1, 50], lambda: 0.5) is None
