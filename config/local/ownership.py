"""Lock a state directory for one stack, and end processes left by an earlier one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from config.local import servers
from config.local.processes import (
    command_line_of,
    end_process,
    environment_of,
    is_alive,
    kill_leftovers,
    open_lock_file,
    processes_with_variable,
    send_signal,
    try_lock,
)
from config.local.programs import PROGRAMS, StackError, stop_time_limit

PROGRAMS_WITHIN = 15.0  #: seconds from SIGTERM to SIGKILL for programs of an earlier stack
#: Seconds from the end of the programs to SIGKILL for what outlived them: runs with a deaf command, and their browsers.
#: A supervisor of a run needs 17 s after the loss of its worker. The maintainer of the browsers ends after both.
LEFTOVERS_WITHIN = 60.0
#: Seconds from SIGTERM to the end of a stack: its programs, their leftovers, its servers.
OWNER_WITHIN = stop_time_limit(PROGRAMS) + LEFTOVERS_WITHIN + servers.STOP_WITHIN
STACK_MARKER = "AFTERTOUCH_STACK"  # inherited by every process of a stack, so that it is found in any session or folder


def stack_note(state_dir: Path) -> Path:
    """Return the file with the addresses and pids of a live stack."""
    return state_dir / "stack.json"


def held_programs(state_dir: Path) -> Path:
    """Return the folder with an empty file for each program that the stack stops and does not start."""
    return state_dir / "held"


@contextmanager
def single_instance_lock(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state directory. It ends with this process and is not inherited."""
    with open_lock_file(state_dir / "stack.lock") as lock:
        if not try_lock(lock):
            raise StackError(
                f"Aftertouch already runs from {state_dir} (pid {owner_pid(state_dir)}); `make stop` ends it, "
                "another AFTERTOUCH_STATE_DIR gives a second one"
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def owner_pid(state_dir: Path) -> int | None:
    """Return the pid of the process that holds the lock; None if none does."""
    path = state_dir / "stack.lock"
    if not path.exists():
        return None
    with path.open("a+") as lock:
        if try_lock(lock):
            return None
        lock.seek(0)
        return int(lock.read() or 0) or None


def end_leftovers(state_dir: Path, *, with_runs: bool) -> None:
    """Send SIGTERM to the programs of the stack, and kill what does not end in time.

    `with_runs`: its runs and browsers must end too. Otherwise the maintainer of the next stack ends them.

    Raises:
        StackError: some do not end.
    """

    def list_programs() -> list[psutil.Process]:
        return processes_with_variable(STACK_MARKER, str(state_dir))

    def find() -> list[psutil.Process]:
        return [*list_programs(), *(list_run_processes(state_dir) if with_runs else ())]

    for process in list_programs():
        send_signal(process, signal.SIGTERM)
    if left := kill_leftovers(find, LEFTOVERS_WITHIN if with_runs else PROGRAMS_WITHIN):
        raise StackError(f"these processes of {state_dir} do not end: {', '.join(str(each.pid) for each in left)}")


def list_run_processes(state_dir: Path) -> list[psutil.Process]:
    """Return the processes of runs and browsers: their environment has other marks. Supervisors have them as words."""
    mark = f"AFTERTOUCH_STATE_DIR={state_dir}"
    # `make stop AFTERTOUCH_STATE_DIR=…` has the mark of a supervisor among its words.
    callers = {each.pid for each in psutil.Process().parents()}

    def is_of_run(process: psutil.Process) -> bool:
        marks = environment_of(process)
        is_program_of_run = marks.get("AFTERTOUCH_TASK_ID") and marks.get("AFTERTOUCH_STATE_DIR") == str(state_dir)
        is_of_browser = marks.get("AFTERTOUCH_BROWSER", "").startswith(f"{state_dir}/")
        return bool(is_program_of_run) or is_of_browser or mark in command_line_of(process)

    return [
        process
        for process in psutil.process_iter()
        if process.pid not in callers and is_of_run(process) and is_alive(process)
    ]


def stop_stack(state_dir: Path) -> None:
    """End the stack of this state directory with its servers. Works also for a stack whose owner was killed."""
    state_dir = state_dir.resolve()
    if (pid := owner_pid(state_dir)) is not None and psutil.pid_exists(pid):
        owner = psutil.Process(pid)
        if "config.local" in command_line_of(owner):
            end_process(owner, (signal.SIGTERM, OWNER_WITHIN), (signal.SIGKILL, 5.0))
    end_leftovers(state_dir, with_runs=True)
    servers.stop_servers(state_dir)
