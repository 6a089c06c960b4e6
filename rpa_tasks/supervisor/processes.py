"""Processes as the kernel tells them: who descends from whom, who carries a mark in its environment, who is gone.

A pid alone names nobody, as it is given to a stranger after its owner's death. So a process is a pid and the instant
it started, and a signal goes through a pidfd that was compared with both.
"""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: After SIGKILL the kernel needs moments; longer means that a process hangs in the kernel or is not ours to kill.
PROOF_SECONDS = 5.0
PAUSE_SECONDS = 0.02


class Process:
    """One process at one look."""

    __slots__ = ("gone", "group", "parent", "pid", "session", "started")

    def __init__(self, pid: int, stat: bytes) -> None:
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.pid = pid
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        self.started = int(fields[19])
        # A zombie can do nothing any more, unless it is only its first thread that has ended.
        self.gone = fields[0] in (b"Z", b"X") and int(fields[17]) <= 1

    def send(self, number: int) -> None:
        """Signal it, or nobody."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            now = look(self.pid)
            if now is not None and now.started == self.started:
                signal.pidfd_send_signal(descriptor, number)
        except OSError:
            pass  # it has just ended, or belongs to somebody else
        finally:
            os.close(descriptor)


def look(pid: int) -> Process | None:
    stat = _read(f"/proc/{pid}/stat")
    return Process(pid, stat) if stat else None


def everyone() -> Iterator[Process]:
    """All that live, except ourselves."""
    me = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != me:
            process = look(int(name))
            if process is not None and not process.gone:
                yield process


def environment(pid: int, having: str = "") -> dict[str, str]:
    """What it was started with. Empty where we may not look, or where `having` is no part of it, which is told at a
    tenth of the cost."""
    found = _read(f"/proc/{pid}/environ")
    if having.encode() not in found:
        return {}
    return dict(os.fsdecode(word).split("=", 1) for word in found.split(b"\0") if b"=" in word)


def family(ancestor: int, marks: dict[str, str]) -> list[Process]:
    """Everyone who descends from `ancestor`, and everyone whose environment carries all `marks`."""
    living = {process.pid: process for process in everyone()}
    return [each for each in living.values() if _descends(each, ancestor, living) or carries(each, marks)]


def real_uid(pid: int) -> int:
    """-1 where it has ended. The owner of its directory in /proc says less: a process can make that root."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return -1


def mount_namespace(pid: int) -> str | None:
    """None where it has ended, or we may not look."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return None


def carries(process: Process, marks: dict[str, str]) -> bool:
    """Whether its environment has all of them; nobody carries none."""
    wanted = {os.fsencode(f"{name}={value}") for name, value in marks.items()}
    return bool(wanted) and wanted <= set(_read(f"/proc/{process.pid}/environ").split(b"\0"))


def terminate(processes: list[Process]) -> None:
    for process in processes:
        process.send(signal.SIGTERM)
        process.send(signal.SIGCONT)  # a stopped one would not notice


def kill(processes: list[Process]) -> None:
    for process in processes:
        process.send(signal.SIGKILL)


def end(find: Callable[[], list[Process]], grace: float) -> list[Process]:
    """End all that `find` finds, also those born meanwhile: SIGTERM, `grace` seconds, SIGKILL. Returns who could not
    be proven gone."""
    left = find()
    terminate(left)
    left = _wait_until_gone(find, grace) if left else []
    return _wait_until_gone(find, PROOF_SECONDS, kill) if left else []


def _wait_until_gone(
    find: Callable[[], list[Process]], seconds: float, strike: Callable[[list[Process]], None] | None = None
) -> list[Process]:
    until = time.monotonic() + seconds
    while True:
        left = find()
        if strike:
            strike(left)
        if not left or time.monotonic() >= until:
            return left
        time.sleep(PAUSE_SECONDS)


def _descends(process: Process, ancestor: int, living: dict[int, Process]) -> bool:
    seen = 0
    while process.parent != ancestor:
        parent = living.get(process.parent)
        seen += 1
        if parent is None or seen > len(living):
            return False
        process = parent
    return True


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        content = b""
        while piece := os.read(descriptor, 65536):
            content += piece
        return content
    except OSError:
        return b""  # it ended under our eyes
    finally:
        os.close(descriptor)
