"""Every way to end a command, and to resist that: no process is alive when the end is reported."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from rpa_tasks.outcomes import CommandResult, ExitCause
from rpa_tasks.supervisor.client import Progress, SupervisedCommand
from rpa_tasks.supervisor.protocol import clock
from tests.rpa_tasks.supervisor.task_commands import (
    DAEMON,
    LONG,
    TaskCommands,
    is_alive,
    read_to_end,
    run_to_end,
    start_runner,
    supervisor_of,
    wait_for_line,
    wait_for_message,
    wait_for_start,
)
from tests.support.waiting import WAIT_LIMIT, eventually

READY = """echo '{"progress": 0, "message": "ready"}';"""
STUBBORN = f"trap '' TERM; {READY} while :; do sleep 0.05; done"
#: Exits on SIGTERM, and reports whether its child got the signal at the same time.
POLITE = f"""
sh -c 'trap "touch child-asked; exit" TERM; while :; do sleep 0.05; done' &
trap 'sleep 0.3; [ -e child-asked ] || echo "child left in peace"; exit 143' TERM
{READY} while :; do sleep 0.05; done
"""
#: Seconds, tried in turn: a slow machine ends the command before the shell has set its trap. That shows nothing.
TIMEOUTS = (2.0, 8.0, 32.0)


def test_command_at_timeout_receives_sigterm(task: TaskCommands) -> None:
    _, ending = run_to_end(task.order("/bin/sleep", "1000", timeout=0.3))
    assert (ending.ended, ending.signal) == (ExitCause.TIMEOUT, signal.SIGTERM)


def test_command_ignoring_sigterm_is_killed_after_timeout(task: TaskCommands) -> None:
    for timeout in TIMEOUTS:
        began = time.monotonic()
        heard, ending = run_to_end(task.shell(STUBBORN, timeout=timeout, hard_after=0.5))
        if any(isinstance(event, Progress) for event in heard):
            break
    assert (ending.ended, ending.signal, ending.survivors) == (ExitCause.TIMEOUT, signal.SIGKILL, 0)
    assert time.monotonic() - began >= timeout + 0.5
    assert task.pids() == []


def test_cancel_signals_command_before_its_children(task: TaskCommands) -> None:
    with SupervisedCommand(task.shell(POLITE, grace=LONG)) as supervised:
        wait_for_message(supervised, "ready")
        supervised.stop("cancelled")
        _, ending = read_to_end(supervised)
    assert (ending.ended, ending.exit) == (ExitCause.CANCELLED, 143)
    assert "child left in peace" in ending.tail
    assert task.pids() == []


def test_waiting_shell_ends_with_its_child(task: TaskCommands) -> None:
    # A shell runs its trap only when its child is over, and a trap is what keeps it from dying at once.
    script = f"trap 'exit 9' TERM; {READY} sleep 1000"
    with SupervisedCommand(task.shell(script)) as supervised:
        wait_for_message(supervised, "ready")
        supervised.stop("node_stopping")
        _, ending = read_to_end(supervised)
    assert (ending.ended, ending.exit) == (ExitCause.NODE_STOPPING, 9)


def test_second_stop_reason_only_shortens_grace(task: TaskCommands) -> None:
    script = """trap 'echo "{\\"progress\\": 1, \\"message\\": \\"asked\\"}"' TERM; while :; do sleep 0.05; done"""
    for timeout in TIMEOUTS:
        with SupervisedCommand(task.shell(script, timeout=timeout, hard_after=LONG, grace=0.5)) as supervised:
            while not isinstance(event := supervised.next_event(1), Progress | CommandResult):
                pass
            supervised.stop("cancelled")  # the timeout alone would give it 1000 s more
            _, ending = read_to_end(supervised)
        if isinstance(event, Progress):
            break
    assert (ending.ended, ending.signal) == (ExitCause.TIMEOUT, signal.SIGKILL)


def test_suspended_command_is_ended(task: TaskCommands) -> None:
    script = f"trap 'exit 9' TERM; {READY} while :; do sleep 0.05; done"
    with SupervisedCommand(task.shell(script, grace=LONG)) as supervised:
        command = wait_for_start(supervised)
        wait_for_message(supervised, "ready")
        os.kill(command, signal.SIGSTOP)
        supervised.stop("cancelled")
        _, ending = read_to_end(supervised)
    assert (ending.ended, ending.exit) == (ExitCause.CANCELLED, 9)


# --- what it leaves behind ----------------------------------------------------------------------------------------


def test_stubborn_daemon_without_marker_is_found_by_descent(task: TaskCommands) -> None:
    place = task.folder / "daemon"
    words = [sys.executable, "-c", DAEMON, str(place), "stubborn"]
    _, ending = run_to_end(task.python(f"import os; os.execve({sys.executable!r}, {words!r}, {{}})"))
    assert (ending.ended, ending.exit, ending.survivors) == (ExitCause.EXITED, 0, 0)
    assert not is_alive(int(place.read_text()))


def test_multiplying_children_are_ended(task: TaskCommands) -> None:
    script = f"""
trap '' TERM
breed() {{ while :; do setsid sh -c 'trap "" TERM; sleep 1000' & sleep 0.01; done; }}
breed & breed & {READY} wait
"""
    with SupervisedCommand(task.shell(script, grace=1)) as supervised:
        wait_for_message(supervised, "ready")
        supervised.stop("cancelled")
        _, ending = read_to_end(supervised)
    assert ending.survivors == 0
    assert task.pids() == []


def test_child_with_open_output_does_not_delay_end(task: TaskCommands) -> None:
    _, ending = run_to_end(task.shell("sleep 1000 & exit 0"))
    assert (ending.ended, ending.exit) == (ExitCause.EXITED, 0)
    assert task.pids() == []


# --- the lease ----------------------------------------------------------------------------------------------------


def test_command_without_extension_is_ended(task: TaskCommands) -> None:
    began = time.monotonic()
    _, ending = run_to_end(task.order("/bin/sleep", "1000", extend_until=clock() + 2))
    assert (ending.ended, ending.signal) == (ExitCause.LEASE_LOST, signal.SIGTERM)
    assert time.monotonic() - began >= 2


def test_command_with_extension_continues(task: TaskCommands) -> None:
    with SupervisedCommand(task.shell("sleep 2.5; exit 5", extend_until=clock() + 2)) as supervised:
        supervised.extend(clock() + WAIT_LIMIT)
        _, ending = read_to_end(supervised)
    assert (ending.ended, ending.exit) == (ExitCause.EXITED, 5)


def test_command_resisting_lost_lease_is_killed_after_grace(task: TaskCommands) -> None:
    with SupervisedCommand(task.shell(STUBBORN, grace=0.5)) as supervised:
        wait_for_message(supervised, "ready")
        supervised.extend(clock())  # as a runner that knows of it may do
        _, ending = read_to_end(supervised)
    assert (ending.ended, ending.signal) == (ExitCause.LEASE_LOST, signal.SIGKILL)


def test_command_frozen_past_lease_and_grace_is_killed_at_once(task: TaskCommands) -> None:
    """The shop may run on another node: only the rest of the grace since the lease ended counts."""
    with SupervisedCommand(task.shell(STUBBORN, grace=WAIT_LIMIT / 2)) as supervised:
        command = wait_for_start(supervised)
        wait_for_message(supervised, "ready")
        guard = supervisor_of(command)
        for pid in (command, guard):
            os.kill(pid, signal.SIGSTOP)
        supervised.extend(clock() - WAIT_LIMIT / 2)  # what its lease looks like when it wakes
        for pid in (command, guard):
            os.kill(pid, signal.SIGCONT)
        began = time.monotonic()
        _, ending = read_to_end(supervised)
    assert (ending.ended, ending.signal, ending.survivors) == (ExitCause.LEASE_LOST, signal.SIGKILL, 0)
    assert time.monotonic() - began < WAIT_LIMIT / 2


def test_result_before_stop_is_kept(task: TaskCommands) -> None:
    script = f"""trap 'exit 0' TERM; echo '{{"result": {{"n": 1}}}}'; {READY} while :; do sleep 0.05; done"""
    with SupervisedCommand(task.shell(script, grace=LONG)) as supervised:
        wait_for_message(supervised, "ready")
        supervised.stop("node_stopping")
        _, ending = read_to_end(supervised)
    assert (ending.exit, ending.result) == (0, {"n": 1})


# --- who else may die ---------------------------------------------------------------------------------------------


def test_killed_runner_ends_its_command(task: TaskCommands) -> None:
    with start_runner(task, STUBBORN) as (runner, command):
        guard = supervisor_of(command)
        runner.kill()
    eventually(lambda: not is_alive(guard))
    assert not is_alive(command)
    assert task.pids() == []


def test_suspended_runner_loses_lease_and_reports_it(task: TaskCommands) -> None:
    with start_runner(task, STUBBORN) as (runner, command):
        os.kill(runner.pid, signal.SIGSTOP)
        eventually(lambda: not is_alive(command))
        os.kill(runner.pid, signal.SIGCONT)
        assert "LEASE_LOST" in wait_for_line(runner, "CommandResult")
        assert runner.wait(WAIT_LIMIT) == 0


def test_runner_that_does_not_read_loses_lease_but_no_event(task: TaskCommands) -> None:
    script = """
import json, sys, time
print(json.dumps({"result": {"text": "值" * 20_000}}, ensure_ascii=False), flush=True)
time.sleep(1000)
"""  # twice as much as fits in the pipe, once it is escaped
    with SupervisedCommand(task.python(script)) as supervised:
        eventually(lambda: task.log.exists() and task.log.read_bytes().endswith(b"\n"))
        supervised.extend(clock())  # its lease is over now
        eventually(lambda: task.pids() == [])
        _, ending = read_to_end(supervised)
    assert (ending.ended, ending.result) == (ExitCause.LEASE_LOST, {"text": "值" * 20_000})


def test_runner_ends_processes_of_killed_supervisor(task: TaskCommands) -> None:
    place = task.folder / "daemon"
    script = DAEMON + "\nprint('before the end', flush=True)\ntime.sleep(1000)"
    with SupervisedCommand(task.python(script, str(place), "stubborn")) as supervised:
        command = wait_for_start(supervised)
        eventually(place.exists)
        eventually(lambda: task.log.exists() and task.log.read_text())
        os.kill(supervisor_of(command), signal.SIGKILL)
        _, ending = read_to_end(supervised)
    assert (ending.ended, ending.survivors) == (ExitCause.SUPERVISOR_LOST, 0)
    assert ending.tail == "before the end\n"
    assert not is_alive(command)
    assert not is_alive(int(place.read_text()))
    assert task.pids() == []


def test_hanging_supervisor_is_given_up(task: TaskCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpa_tasks.supervisor.client.OVERDUE_AFTER", 0.5)
    with SupervisedCommand(task.shell("sleep 1000", grace=0.1)) as supervised:
        command = wait_for_start(supervised)
        os.kill(supervisor_of(command), signal.SIGSTOP)
        supervised.stop("cancelled")
        _, ending = read_to_end(supervised)
    assert ending.ended == ExitCause.SUPERVISOR_LOST
    assert task.pids() == []


def test_terminated_supervisor_ends_command(task: TaskCommands) -> None:
    with SupervisedCommand(task.shell("sleep 1000")) as supervised:
        os.kill(supervisor_of(wait_for_start(supervised)), signal.SIGTERM)
        _, ending = read_to_end(supervised)
    assert (ending.ended, ending.signal) == (ExitCause.NODE_STOPPING, signal.SIGTERM)


def test_leaving_context_ends_all_processes(task: TaskCommands) -> None:
    with SupervisedCommand(task.shell("sleep 1000")) as supervised:
        wait_for_start(supervised)
    assert supervised.close().ended == ExitCause.RUNNER_LOST
    assert task.pids() == []
