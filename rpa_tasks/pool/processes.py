"""Which processes belong to a browser, read from /proc.

Chromium scatters: its crash handlers leave for sessions of their own, its renderers overwrite their environment. What
keeps the session, the environment marker or the profile on its command line is ours. A zombie counts as dead: it holds
nothing, and not every container has a process 1 that reaps.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARKER = "AFTERTOUCH_BROWSER"
PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    session: int
    ticks: int  #: start, in clock ticks since boot
    rss_kb: int


def find(pid: int) -> Process | None:
    """None: no such process, or a zombie."""
    try:
        # The name in parentheses may hold anything, even a parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in b"ZXx":
        return None
    return Process(pid=pid, session=int(fields[3]), ticks=int(fields[19]), rss_kb=int(fields[21]) * PAGE_KB)


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process that started then is still there."""
    process = find(pid)
    return process is not None and process.ticks == ticks


def browser_processes(*, marker: str, profile: str, leader: tuple[int, int] = (0, 0)) -> list[Process]:
    """Everything alive that belongs to the browser started with this marker, this profile directory and, as far as
    known, this (pid, ticks)."""
    pid, ticks = leader
    head = find(pid) if pid else None
    # A pid is not given to anybody else while a session is called by it: another process of that pid, no session left.
    session = 0 if head is not None and head.ticks != ticks else pid
    return [
        process
        for process in _everybody()
        if (session and process.session == session)
        or environment(process.pid).get(MARKER) == marker
        or ("--type=" in command_line(process.pid) and uses_profile(process.pid, profile))
    ]


def strangers(profile: str) -> list[int]:
    """Pids of browsers on this profile that no pool started: a person's."""
    return [
        process.pid
        for process in _everybody()
        if uses_profile(process.pid, profile)
        and not environment(process.pid).get(MARKER)
        and "--type=" not in command_line(process.pid)
    ]


def uses_profile(pid: int, profile: str) -> bool:
    """Whether its command line names the profile. Chromium joins its words with spaces in some of its processes."""
    return bool(profile) and f"--user-data-dir={profile} " in f"{command_line(pid)} "


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").rstrip()
    except OSError:
        return ""


def environment(pid: int) -> dict[str, str]:
    """As it was given at the start; empty where it may not be read or was overwritten."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def listens(pid: int, port: int) -> bool:
    """Whether the socket that listens on this port of the loopback belongs to the process."""
    sockets = _listening(port)
    if not sockets:
        return False
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}") in sockets:
                    return True
    return False


def send(process: Process, number: signal.Signals) -> None:
    """Signal this very process, never a later one with its pid."""
    with suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(process.pid)
        try:
            if is_alive(process.pid, process.ticks):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def wait_for_end(pid: int, *, seconds: float) -> bool:
    """Sleep until the process ends. False: it did not in time."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _everybody() -> Iterator[Process]:
    """Not only what /proc says is this user's: it shows a sandboxed renderer as root's."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := find(int(name))):
            yield process


def _listening(port: int) -> set[str]:
    """`socket:[inode]` of what listens on the port on IPv4."""
    wanted = f":{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        return {
            f"socket:[{fields[9]}]"
            for line in table
            if (fields := line.split())[3] == "0A" and fields[1].endswith(wanted)
        }
