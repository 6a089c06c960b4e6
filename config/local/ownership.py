"""Lock a state directory for one stack, and end processes left by an earlier one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from config.local import servers
from config.local.processes import (
    command_line_of,
    end_process,
    kill_leftovers,
    open_lock_file,
    processes_with_variable,
    send_signal,
    try_lock,
)
from config.local.programs import PROGRAMS, StackError, stop_time_limit

LEFTOVERS_WITHIN = 2.0  #: seconds from SIGTERM to SIGKILL for processes that outlived their program
#: Seconds from SIGTERM to the end of a stack: its programs, their leftovers, its servers.
OWNER_WITHIN = stop_time_limit(PROGRAMS) + LEFTOVERS_WITHIN + servers.STOP_WITHIN
STACK_MARKER = "AFTERTOUCH_STACK"  # inherited by every process of a stack, so that it is found in any session or folder


def add_stack_marker(environment: Mapping[str, str], state_dir: Path) -> dict[str, str]:
    return {**environment, STACK_MARKER: str(state_dir)}


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
    try:
        return int((state_dir / "stack.lock").read_text())
    except (FileNotFoundError, ValueError):
        return None


def is_owned(state_dir: Path) -> bool:
    if not (state_dir / "stack.lock").exists():
        return False
    with (state_dir / "stack.lock").open("a") as lock:
        return not try_lock(lock)


def kill_stale_processes(state_dir: Path, seconds: float = 15.0) -> None:
    """End marked processes: SIGTERM, then SIGKILL after `seconds`."""

    def find() -> list[psutil.Process]:
        return processes_with_variable(STACK_MARKER, str(state_dir))

    for process in find():
        send_signal(process, signal.SIGTERM)
    if left := kill_leftovers(find, seconds):
        raise StackError(f"these processes of {state_dir} do not end: {', '.join(str(each.pid) for each in left)}")


def stop_stack(state_dir: Path) -> None:
    """End the stack of this state directory with its servers. Works also for a stack whose owner was killed."""
    state_dir = state_dir.resolve()
    pid = owner_pid(state_dir)
    if pid is not None and is_owned(state_dir) and psutil.pid_exists(pid):
        owner = psutil.Process(pid)
        if "config.local" in command_line_of(owner):
            end_process(owner, (signal.SIGTERM, OWNER_WITHIN), (signal.SIGKILL, 5.0))
    kill_stale_processes(state_dir, seconds=5.0)
    servers.stop_servers(state_dir)
