"""What the kernel leaves alive when it kills a command with its guard. No database is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_django import Settings

from rpa_tasks.supervisor import processes
from rpa_tasks.supervisor.client import SupervisedCommand
from rpa_tasks.supervisor.runs import LEASE_NO, TASK_ID, Ancestry, end_unsupervised
from tests.rpa_tasks.supervisor.task_commands import (
    DAEMON,
    TaskCommands,
    is_alive,
    start_runner,
    supervisor_of,
    wait_for_message,
    wait_for_start,
)
from tests.support.waiting import eventually

#: A command with a child and a grandchild that reports when all have started.
BRANCHES = """sh -c 'sleep 1000 & touch "$HOME/there"; wait' & wait"""
#: The same, and every process ignores SIGTERM.
STUBBORN_BRANCHES = f"trap '' TERM; {BRANCHES}; while :; do wait; done"


@pytest.fixture(autouse=True)
def own_node(settings: Settings, tmp_path: Path) -> None:
    """Processes of other users are not examined."""
    settings.AFTERTOUCH_STATE_DIR = tmp_path


def descendants(task: TaskCommands, command: int) -> list[processes.Process]:
    """The child and its child. `touch`, which signals their start, may outlive that."""
    eventually((task.folder / "there").exists)
    eventually(lambda: len(task.pids()) == 3)
    return [look for pid in task.pids() if pid != command and (look := processes.read_process(pid))]


def test_killed_supervisor_orphans_are_ended(task: TaskCommands) -> None:
    with start_runner(task, STUBBORN_BRANCHES) as (runner, command):
        left = descendants(task, command)
        assert all(map(Ancestry().has_supervisor, left))
        os.kill(runner.pid, signal.SIGSTOP)  # it would see to it itself
        os.kill(supervisor_of(command), signal.SIGKILL)
        runner.kill()
    eventually(lambda: not is_alive(command))
    assert [is_alive(process.pid) for process in left] == [True] * len(left)

    assert end_unsupervised() == 0
    assert task.pids() == []


def test_supervised_daemon_is_kept(task: TaskCommands) -> None:
    place = task.folder / "daemon"
    with SupervisedCommand(task.python(DAEMON + "\ntime.sleep(1000)", str(place))) as supervised:
        command = wait_for_start(supervised)
        eventually(place.exists)
        guard, daemon = supervisor_of(command), int(place.read_text())
        eventually(lambda: supervisor_of(daemon) == guard)

        assert end_unsupervised() == 2
        assert is_alive(command)
        assert is_alive(daemon)


def test_processes_of_other_node_are_kept(task: TaskCommands) -> None:
    another = subprocess.Popen(["/bin/sleep", "1000"], env=task.env | {"AFTERTOUCH_STATE_DIR": "/somewhere/else"})
    try:
        assert end_unsupervised() == 0
        assert another.poll() is None
    finally:
        another.kill()
        another.wait()


def test_process_whose_parent_has_just_ended_counts_as_supervised(task: TaskCommands) -> None:
    """The supervisor adopts it. A check between the parent's end and the adoption would end a run in good order."""
    with SupervisedCommand(task.shell(f"{BRANCHES}; sleep 1000")) as supervised:
        command = wait_for_start(supervised)
        left = descendants(task, command)
        orphan = next(process for process in left if process.parent != command)
        before, guard = Ancestry(), supervisor_of(command)
        assert before._processes.pop(orphan.parent)  # as if it had ended before it was read
        os.kill(orphan.parent, signal.SIGKILL)
        eventually(lambda: supervisor_of(orphan.pid) == guard)
        assert before.has_supervisor(orphan)
        assert Ancestry().find_run(orphan)


def test_ended_process_counts_as_supervised(task: TaskCommands) -> None:
    process = subprocess.Popen(["/bin/sleep", "1000"], env=task.env)
    seen = processes.read_process(process.pid)
    assert seen
    assert not Ancestry().has_supervisor(seen)
    process.kill()
    process.wait()
    assert Ancestry().has_supervisor(seen)


#: Looks like a supervisor process and has a child.
PRETENDER = """
import os, subprocess
child = subprocess.Popen(["/bin/sleep", "1000"])
print('{"progress": 0, "message": "ready"}', flush=True)
child.wait()
"""


def test_process_of_a_sandbox_that_looks_like_a_supervisor_process_is_none(task: TaskCommands) -> None:
    script = task.folder / "rpa_tasks" / "supervisor" / "main.py"
    script.parent.mkdir(parents=True)
    script.write_text(PRETENDER)
    words = [*task.prefix("bubblewrap"), sys.executable, "-I", "-S", str(script)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as started:
        try:
            assert started.stdout
            assert started.stdout.readline()
            eventually(lambda: find_sleeps(started.pid))  # between fork and exec it has another name
            (child,) = find_sleeps(started.pid)
            assert not Ancestry().has_supervisor(child)
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def find_sleeps(session: int) -> list[processes.Process]:
    return [each for each in processes.all_processes() if each.session == session and is_sleep(each)]


def find_sleeps_of(task: TaskCommands) -> list[processes.Process]:
    marked = set(task.pids())
    return [each for each in processes.all_processes() if each.pid in marked and is_sleep(each)]


def is_sleep(process: processes.Process) -> bool:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"/bin/sleep")


def test_process_below_a_forged_supervisor_process_belongs_to_the_run_of_the_real_one(task: TaskCommands) -> None:
    script = task.folder / "rpa_tasks" / "supervisor" / "main.py"
    script.parent.mkdir(parents=True)
    script.write_text(PRETENDER)
    words = (sys.executable, "-I", "-S", str(script), f"{TASK_ID}=another", f"{LEASE_NO}=99")
    with SupervisedCommand(task.order(*words)) as supervised:
        wait_for_start(supervised)
        wait_for_message(supervised, "ready")
        eventually(lambda: find_sleeps_of(task))  # between fork and exec it has another name
        (child,) = find_sleeps_of(task)
        markers = Ancestry().find_run(child)
        assert markers
        assert (markers[TASK_ID], markers[LEASE_NO]) == (task.task_id, task.env[LEASE_NO])


def test_environment_is_read_while_the_process_executes_programs(tmp_path: Path) -> None:
    """In an execve the kernel shows none: six of a hundred reads found no mark, and a sweep left the process alive."""
    script = tmp_path / "execute-again"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o755)
    with subprocess.Popen([script], env={TASK_ID: "t1"}) as process:
        try:
            eventually(lambda: Path(f"/proc/{process.pid}/comm").read_text() == f"{script.name[:15]}\n")
            found = [processes.read_environment(process.pid).get(TASK_ID) for _ in range(3_000)]
        finally:
            process.kill()
    assert found == ["t1"] * 3_000


def test_empty_environment_is_read_at_once() -> None:
    with subprocess.Popen(["sleep", "1000"], env={}) as process:
        try:
            eventually(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes() == b"sleep\x001000\x00")
            assert processes.read_environment(process.pid) == {}
        finally:
            process.kill()
