"""Lock a state directory for one stack, and end processes left by an earlier one."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from config.local import servers
from config.local.processes import carrying, command_line, end, is_alive, send, wait_until
from config.local.programs import PROGRAMS, StackError, stop_within

LEFTOVERS_WITHIN = 2.0  #: seconds from SIGTERM to SIGKILL for processes that outlived their program
#: Seconds from SIGTERM to the end of a stack: its programs, their leftovers, its servers.
OWNER_WITHIN = stop_within(PROGRAMS) + LEFTOVERS_WITHIN + servers.STOP_WITHIN
MARK = "AFTERTOUCH_STACK"  # inherited by every process of a stack, so that it is found in any session or folder


def marked(environment: Mapping[str, str], state_dir: Path) -> dict[str, str]:
    return {**environment, MARK: str(state_dir)}


@contextmanager
def sole_owner(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state directory. It ends with this process and is not inherited."""
    with (state_dir / "stack.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(
                f"Aftertouch already runs from {state_dir} (pid {owner_pid(state_dir)}); `make stop` ends it, "
                "another AFTERTOUCH_STATE_DIR gives a second one"
            ) from None
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def end_leftovers(state_dir: Path, patience: float = 15.0) -> None:
    """End marked processes: SIGTERM, then SIGKILL in rounds, because a process may start another."""
    leftovers = carrying(MARK, str(state_dir))
    for process in leftovers:
        send(process, signal.SIGTERM)
    wait_until(lambda: not any(is_alive(process) for process in leftovers), patience)
    for _ in range(10):
        leftovers = [process for process in carrying(MARK, str(state_dir)) if is_alive(process)]
        if not leftovers:
            return
        for process in leftovers:
            end(process, (signal.SIGKILL, 2.0))
    raise StackError(f"these processes of {state_dir} do not end: {', '.join(str(left.pid) for left in leftovers)}")


def stop(state_dir: Path) -> None:
    """End the stack of this state directory with its servers. Works also for a stack whose owner was killed."""
    state_dir = state_dir.resolve()
    pid = owner_pid(state_dir)
    if pid is not None and is_owned(state_dir) and psutil.pid_exists(pid):
        owner = psutil.Process(pid)
        if "config.local" in command_line(owner):
            end(owner, (signal.SIGTERM, OWNER_WITHIN), (signal.SIGKILL, 5.0))
    end_leftovers(state_dir, patience=5.0)
    servers.stop(state_dir)
