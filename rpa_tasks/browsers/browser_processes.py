"""Which processes belong to a browser.

Chromium scatters: its crash handlers leave for sessions of their own, its renderers overwrite their environment. What
keeps the session or the mark in its environment is ours. The profile on a command line says less: a person may have
opened it. A flow can write both, so neither counts for a profile that its process cannot reach.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rpa_tasks.supervisor.markers import TASK_ID
from rpa_tasks.supervisor.processes import Process, carries, environment, everyone, look, real_uid

MARKER = "AFTERTOUCH_BROWSER"
PAGE = os.sysconf("SC_PAGE_SIZE")


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process that started then is still there."""
    process = look(pid)
    return process is not None and not process.gone and process.started == ticks


def family(*, marker: str, leader: tuple[int, int], profile: str = "") -> list[Process]:
    """Everyone alive of the browser started with this marker and, as far as known, as this (pid, ticks) and on this
    profile."""
    marks = {MARKER: marker}
    in_session = _session_test(*leader)
    return [
        process
        for process in everyone()
        if in_session(process) or (carries(process, marks) and (not profile or reaches(process.pid, profile)))
    ]


def _session_test(pid: int, ticks: int) -> Callable[[Process], bool]:
    """Whether a process is in the session that this one led. A session's number can be given again once all of the
    session is gone; so where the leader is dead, only what looks like Chromium's counts: some daemon may be called by
    that number today."""
    head = look(pid) if pid else None
    if not pid or (head is not None and head.started != ticks):
        return lambda process: False
    if head is not None and not head.gone:
        return lambda process: process.session == pid
    return lambda process: process.session == pid and "--type=" in command_line(process.pid)


def marked_slots(browsers: str) -> set[int]:
    """The slots of this folder that some process claims to belong to."""
    found = (re.fullmatch(rf"{re.escape(browsers)}/slot-(\d+)", marker) for marker in map(_marker, everyone()))
    return {int(match[1]) for match in found if match}


def left_on(profile: str) -> list[Process]:
    """Browsers on this profile that a pool started."""
    return [each for each in users_of(profile) if _marker(each)]


def strangers(profile: str) -> list[int]:
    """Pids of browsers on this profile that no pool started: a person's."""
    return [
        process.pid
        for process in users_of(profile)
        if "--type=" not in command_line(process.pid)  # renderers and the like have overwritten their mark
        and not _marker(process)
    ]


def users_of(profile: str) -> Iterator[Process]:
    """Processes that name this profile and can reach it. A run's own are none: bwrap itself has the words of the
    command and is not confined."""
    for process in everyone():
        if (
            names_profile(command_line(process.pid), profile)
            and not environment(process.pid, having=TASK_ID)
            and reaches(process.pid, profile)
        ):
            yield process


def reaches(pid: int, folder: str) -> bool:
    """Whether this directory of ours has the same path for the process. Isolation hides a profile from other shops.

    Links in the process's root are not followed: they would be resolved in ours. A root that we may not look into is
    another user's, or of a process that hides; of these only root's can open a profile.
    """
    ours = os.path.realpath(folder)
    try:
        place = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return real_uid(pid) == 0
    except OSError:
        return False
    try:
        for name in ours.split("/")[1:]:
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            os.close(place)
            place = below
        return os.path.samestat(os.fstat(place), os.stat(ours))
    except OSError:
        return False
    finally:
        os.close(place)


def names_profile(line: str, profile: str) -> bool:
    return bool(profile) and f"--user-data-dir={profile} " in f"{line} "


def command_line(pid: int) -> str:
    """Joined by spaces, as Chromium does with that of its renderers."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").rstrip()
    except OSError:
        return ""


def listens(pid: int, port: int) -> bool:
    """Whether the socket that listens on this port belongs to the process or, where that only holds the browser's
    sandbox, to one of its session."""
    sockets = _listening(port)
    if not sockets:
        return False
    if _holds(pid, sockets):
        return True
    return any(_holds(each.pid, sockets) for each in everyone() if each.session == pid)


def _holds(pid: int, sockets: set[str]) -> bool:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}") in sockets:
                    return True
    return False


def memory_by_session() -> dict[int, int]:
    """Bytes that each session's processes have in memory. Chromium's processes share hundreds of MB of code; that is
    counted once, for the one that has most of it."""
    own: Counter[int] = Counter()
    shared: dict[int, int] = {}
    for process in everyone():
        with suppress(OSError):
            _, resident, common, *_ = map(int, Path(f"/proc/{process.pid}/statm").read_text().split())
            own[process.session] += (resident - common) * PAGE
            shared[process.session] = max(shared.get(process.session, 0), common * PAGE)
    return {session: used + shared[session] for session, used in own.items()}


def _marker(process: Process) -> str:
    return environment(process.pid).get(MARKER, "")


def _listening(port: int) -> set[str]:
    """`socket:[inode]` of what listens on the port, on IPv4."""
    wanted = f":{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        return {
            f"socket:[{fields[9]}]"
            for line in table
            if (fields := line.split())[3] == "0A" and fields[1].endswith(wanted)
        }
