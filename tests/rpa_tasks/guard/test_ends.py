"""Every way to end a command, and every way it may resist: nothing of it is alive when its end is told."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from rpa_tasks.outcomes import ExitCause
from rpa_tasks.supervisor.client import FlowResult, SupervisedCommand
from rpa_tasks.supervisor.clock import clock
from tests.rpa_tasks.guard.house import (
    DAEMON,
    PATIENCE,
    House,
    eventually,
    guard_of,
    hear,
    hear_out,
    is_alive,
    start_runner,
    wait_for_line,
    wait_for_message,
    wait_for_start,
)

READY = """echo '{"progress": 0, "message": "ready"}';"""
STUBBORN = f"trap '' TERM; {READY} while :; do sleep 0.05; done"
#: Leaves in good order when it is asked to, and tells whether its child was asked at the same time.
POLITE = f"""
sh -c 'trap "touch child-asked" TERM; while :; do sleep 0.05; done' &
trap 'sleep 0.3; [ -e child-asked ] || echo "child left in peace"; exit 143' TERM
{READY} while :; do sleep 0.05; done
"""


def test_a_command_that_never_ends_is_asked_at_its_timeout(house: House) -> None:
    _, ending = hear_out(house.order("/bin/sleep", "1000", timeout=0.3))
    assert (ending.ended, ending.signal) == (ExitCause.TIMEOUT, signal.SIGTERM)


def test_one_that_ignores_sigterm_is_killed_a_while_after_its_timeout(house: House) -> None:
    began = time.monotonic()
    _, ending = hear_out(house.shell(STUBBORN, timeout=6, hard_after=0.5))
    assert (ending.ended, ending.signal, ending.survivors) == (ExitCause.TIMEOUT, signal.SIGKILL, 0)
    assert time.monotonic() - began >= 6.5
    assert house.pids() == []


def test_cancelling_asks_the_command_first_and_its_children_later(house: House) -> None:
    with SupervisedCommand(house.shell(POLITE)) as guarded:
        wait_for_message(guarded, "ready")
        guarded.stop("cancelled")
        _, ending = hear(guarded)
    assert (ending.ended, ending.exit) == (ExitCause.CANCELLED, 143)
    assert "child left in peace" in ending.tail
    assert house.pids() == []


def test_a_shell_that_waits_for_its_child_ends_with_the_child(house: House) -> None:
    # A shell runs its trap only when its child is over, and a trap is what keeps it from dying at once.
    script = f"trap 'exit 9' TERM; {READY} sleep 1000"
    with SupervisedCommand(house.shell(script, grace=6)) as guarded:
        wait_for_message(guarded, "ready")
        guarded.stop("node_stopping")
        _, ending = hear(guarded)
    assert (ending.ended, ending.exit) == (ExitCause.NODE_STOPPING, 9)


def test_the_first_reason_stays_and_a_second_only_hastens_it(house: House) -> None:
    script = """trap 'echo "{\\"progress\\": 1, \\"message\\": \\"asked\\"}"' TERM; while :; do sleep 0.05; done"""
    with SupervisedCommand(house.shell(script, timeout=6, grace=0.5)) as guarded:
        wait_for_message(guarded, "asked")
        guarded.stop("cancelled")  # the timeout alone would give it 50 s more
        began = time.monotonic()
        _, ending = hear(guarded)
    assert (ending.ended, ending.signal) == (ExitCause.TIMEOUT, signal.SIGKILL)
    assert time.monotonic() - began < 30


def test_a_stopped_command_ends_too(house: House) -> None:
    script = f"trap 'exit 9' TERM; {READY} while :; do sleep 0.05; done"
    with SupervisedCommand(house.shell(script)) as guarded:
        command = wait_for_start(guarded)
        wait_for_message(guarded, "ready")
        os.kill(command, signal.SIGSTOP)
        guarded.stop("cancelled")
        _, ending = hear(guarded)
    assert (ending.ended, ending.exit) == (ExitCause.CANCELLED, 9)


# --- what it leaves behind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("manner", ["", "stubborn"])
def test_a_daemon_that_outlives_its_command_is_ended_before_the_end_is_told(house: House, manner: str) -> None:
    place = house.folder / "daemon"
    _, ending = hear_out(house.python(DAEMON, str(place), manner))
    assert (ending.ended, ending.exit, ending.survivors) == (ExitCause.EXITED, 0, 0)
    assert not is_alive(int(place.read_text()))


def test_a_daemon_without_our_marker_is_found_by_its_descent(house: House) -> None:
    place = house.folder / "daemon"
    script = f"import os, sys; os.execve(sys.executable, [sys.executable, '-c', {DAEMON!r}, {str(place)!r}], {{}})"
    _, ending = hear_out(house.python(script))
    assert (ending.exit, ending.survivors) == (0, 0)
    assert not is_alive(int(place.read_text()))


def test_a_process_with_our_marker_that_descends_from_somebody_else_is_found(house: House) -> None:
    stranger = subprocess.Popen(["/bin/sleep", "1000"], env=house.env)
    try:
        _, ending = hear_out(house.order("/bin/true"))
        assert (ending.ended, ending.survivors) == (ExitCause.EXITED, 0)
        assert stranger.wait(PATIENCE) == -signal.SIGTERM
    finally:
        stranger.kill()
        stranger.wait()


def test_children_that_multiply_do_not_get_away(house: House) -> None:
    script = f"""
trap '' TERM
breed() {{ while :; do setsid sh -c 'trap "" TERM; sleep 1000' & sleep 0.01; done; }}
breed & breed & {READY} wait
"""
    with SupervisedCommand(house.shell(script, grace=1)) as guarded:
        wait_for_message(guarded, "ready")
        guarded.stop("cancelled")
        _, ending = hear(guarded)
    assert ending.survivors == 0
    assert house.pids() == []


def test_a_child_that_keeps_the_output_open_does_not_hold_the_end_up(house: House) -> None:
    _, ending = hear_out(house.shell("sleep 1000 & exit 0"))
    assert (ending.ended, ending.exit) == (ExitCause.EXITED, 0)
    assert house.pids() == []


# --- the lease ----------------------------------------------------------------------------------------------------


def test_without_an_extension_in_time_it_is_ended(house: House) -> None:
    began = time.monotonic()
    _, ending = hear_out(house.order("/bin/sleep", "1000", extension=2))
    assert (ending.ended, ending.signal) == (ExitCause.LEASE_LOST, signal.SIGTERM)
    assert time.monotonic() - began >= 2


def test_extended_in_time_it_goes_on(house: House) -> None:
    with SupervisedCommand(house.shell("sleep 2.5; exit 5", extension=2)) as guarded:
        guarded.extend(clock() + PATIENCE)
        _, ending = hear(guarded)
    assert (ending.ended, ending.exit) == (ExitCause.EXITED, 5)


def test_the_first_extension_can_come_with_the_order(house: House) -> None:
    _, ending = hear_out(house.order("/bin/sleep", "1000", extension=1000, extend_until=clock() + 2))
    assert ending.ended == ExitCause.LEASE_LOST or ending.error == "lease_lost"  # before it began, on a slow machine


def test_what_resists_the_loss_of_its_lease_is_killed_after_the_grace(house: House) -> None:
    with SupervisedCommand(house.shell(STUBBORN, grace=0.5)) as guarded:
        wait_for_message(guarded, "ready")
        guarded.extend(clock())  # as a runner may say that has learnt of it
        _, ending = hear(guarded)
    assert (ending.ended, ending.signal) == (ExitCause.LEASE_LOST, signal.SIGKILL)


@pytest.mark.faults
def test_after_a_freeze_longer_than_lease_and_grace_nothing_gets_another_grace(house: House) -> None:
    """Elsewhere the shop may be running again: only what is left of the grace since the lease ran out counts."""
    with SupervisedCommand(house.shell(STUBBORN, grace=PATIENCE / 2)) as guarded:
        command = wait_for_start(guarded)
        wait_for_message(guarded, "ready")
        guard = guard_of(command)
        for pid in (command, guard):
            os.kill(pid, signal.SIGSTOP)
        guarded.extend(clock() - PATIENCE / 2)  # what its lease looks like when it wakes
        for pid in (command, guard):
            os.kill(pid, signal.SIGCONT)
        began = time.monotonic()
        _, ending = hear(guarded)
    assert (ending.ended, ending.signal, ending.survivors) == (ExitCause.LEASE_LOST, signal.SIGKILL, 0)
    assert time.monotonic() - began < PATIENCE / 2


def test_a_result_before_the_stop_is_kept(house: House) -> None:
    script = f"""trap 'exit 0' TERM; echo '{{"result": {{"n": 1}}}}'; {READY} while :; do sleep 0.05; done"""
    with SupervisedCommand(house.shell(script)) as guarded:
        wait_for_message(guarded, "ready")
        guarded.stop("node_stopping")
        _, ending = hear(guarded)
    assert (ending.exit, ending.result) == (0, {"n": 1})


# --- who else may die ---------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("script", ["sleep 1000 & sleep 1000", STUBBORN])
def test_a_runner_that_is_killed_takes_its_command_along(house: House, script: str) -> None:
    with start_runner(house, script) as (runner, command):
        guard = guard_of(command)
        runner.kill()
    eventually(lambda: not is_alive(guard))
    assert not is_alive(command)
    assert house.pids() == []


@pytest.mark.faults
def test_a_runner_that_is_stopped_loses_its_lease_and_learns_it_later(house: House) -> None:
    with start_runner(house, STUBBORN) as (runner, command):
        os.kill(runner.pid, signal.SIGSTOP)
        eventually(lambda: not is_alive(command))
        os.kill(runner.pid, signal.SIGCONT)
        assert "LEASE_LOST" in wait_for_line(runner, "CommandResult")
        assert runner.wait(PATIENCE) == 0


def test_a_runner_that_does_not_read_keeps_no_command_alive_and_misses_nothing(house: House) -> None:
    script = """
import json, sys, time
print(json.dumps({"result": {"text": "值" * 20_000}}, ensure_ascii=False), flush=True)
time.sleep(1000)
"""  # twice as much as fits in the pipe, once it is escaped
    with SupervisedCommand(house.python(script)) as guarded:
        eventually(lambda: house.log.exists() and house.log.read_bytes().endswith(b"\n"))
        guarded.extend(clock())  # its lease is over now
        eventually(lambda: house.pids() == [])
        heard, ending = hear(guarded)
    assert len(heard) == 2
    assert (ending.ended, ending.result) == (ExitCause.LEASE_LOST, {"text": "值" * 20_000})


def test_what_did_not_fit_in_the_pipe_comes_as_soon_as_the_runner_reads(house: House) -> None:
    script = """
import json, time
print(json.dumps({"result": {"text": "值" * 20_000}}, ensure_ascii=False), flush=True)
time.sleep(1000)
"""
    with SupervisedCommand(house.python(script)) as guarded:
        eventually(lambda: house.log.exists() and house.log.stat().st_size)
        wait_for_start(guarded)
        assert isinstance(guarded.next_event(20), FlowResult)
        guarded.stop("cancelled")


@pytest.mark.faults
def test_a_command_dies_with_its_guard_even_if_nobody_looks(house: House) -> None:
    with start_runner(house, STUBBORN) as (runner, command):
        os.kill(runner.pid, signal.SIGSTOP)
        os.kill(guard_of(command), signal.SIGKILL)
        eventually(lambda: not is_alive(command))


@pytest.mark.faults
@pytest.mark.parametrize("manner", ["", "stubborn"])
def test_when_the_guard_is_killed_the_runner_ends_what_is_left(house: House, manner: str) -> None:
    place = house.folder / "daemon"
    script = DAEMON + "\nprint('before the end', flush=True)\ntime.sleep(1000)"
    with SupervisedCommand(house.python(script, str(place), manner)) as guarded:
        command = wait_for_start(guarded)
        eventually(place.exists)
        eventually(lambda: house.log.exists() and house.log.read_text())
        os.kill(guard_of(command), signal.SIGKILL)
        _, ending = hear(guarded)
    assert (ending.ended, ending.survivors, ending.started) == (ExitCause.SUPERVISOR_LOST, 0, True)
    assert ending.tail == "before the end\n"
    assert not is_alive(command)
    assert not is_alive(int(place.read_text()))
    assert house.pids() == []


@pytest.mark.faults
def test_a_guard_that_hangs_is_given_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpa_tasks.supervisor.client.OVERDUE_AFTER", 0.5)
    with SupervisedCommand(house.shell("sleep 1000", grace=0.1)) as guarded:
        command = wait_for_start(guarded)
        os.kill(guard_of(command), signal.SIGSTOP)
        guarded.stop("cancelled")
        _, ending = hear(guarded)
    assert ending.ended == ExitCause.SUPERVISOR_LOST
    assert house.pids() == []


@pytest.mark.faults
def test_a_guard_that_is_terminated_ends_its_command_first(house: House) -> None:
    with SupervisedCommand(house.shell("sleep 1000")) as guarded:
        os.kill(guard_of(wait_for_start(guarded)), signal.SIGTERM)
        _, ending = hear(guarded)
    assert (ending.ended, ending.signal) == (ExitCause.NODE_STOPPING, signal.SIGTERM)


@pytest.mark.faults
def test_a_command_that_is_killed_from_outside_is_no_doing_of_ours(house: House) -> None:
    with SupervisedCommand(house.shell("sleep 1000")) as guarded:
        os.kill(wait_for_start(guarded), signal.SIGKILL)
        _, ending = hear(guarded)
    assert (ending.ended, ending.signal) == (ExitCause.EXITED, signal.SIGKILL)


def test_leaving_before_the_end_waits_until_nothing_is_left(house: House) -> None:
    with SupervisedCommand(house.shell("sleep 1000")) as guarded:
        wait_for_start(guarded)
    assert guarded.close().ended == ExitCause.RUNNER_LOST
    assert house.pids() == []
