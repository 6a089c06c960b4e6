"""Find the processes, sockets and memory of a browser, and remove Chromium's own lock on a profile after a crash.

Chromium's crash handlers leave its session, and its renderers overwrite their environment. A process belongs to a
browser by its session or by the mark in its environment. The profile on a command line is weaker: a person may have
opened it. A flow can forge mark and command line. So they count only for a process without a supervisor process, and
for a profile that the process can reach.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rpa_tasks.supervisor.processes import (
    Process,
    all_processes,
    read_environment,
    read_process,
    real_uid,
)
from rpa_tasks.supervisor.runs import TASK_ID, Ancestry

MARKER = "AFTERTOUCH_BROWSER"
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
SINGLETON_FILES = ("SingletonLock", "SingletonSocket", "SingletonCookie")


def find_browser_family(*, marker: str, leader: tuple[int, int], profile: str = "") -> list[Process]:
    """Return the running processes of the browser with this marker and, if known, this (pid, ticks) and profile."""
    pid, ticks = leader
    head = read_process(pid) if pid else None
    is_reused = head is not None and head.started != ticks
    is_alive = head is not None and not head.gone
    ancestry = Ancestry()

    def is_in_session(process: Process) -> bool:
        # The kernel reuses the number of a session that has ended. If the leader is dead, only processes that look like
        # Chromium's count: another daemon may have the number.
        is_member = pid > 0 and process.session == pid and not is_reused
        return is_member and (is_alive or "--type=" in read_command_line(process.pid))

    def is_marked(process: Process) -> bool:
        return (
            read_environment(process.pid, having=MARKER).get(MARKER) == marker
            and (not profile or reaches_profile(process.pid, profile))
            and not ancestry.has_supervisor(process)
        )

    return [process for process in all_processes() if is_in_session(process) or is_marked(process)]


def leftover_browsers_on(profile: str) -> list[Process]:
    """Return browsers on this profile that a pool started."""
    return [each for each in processes_on_profile(profile) if _marker_of(each)]


def unowned_processes(profile: str) -> list[int]:
    """Return pids of browsers on this profile that a person started."""
    return [
        process.pid
        for process in processes_on_profile(profile)
        if not _marker_of(process)
        # Behind the mark: a process that has just ended shows neither. Renderers and helpers have overwritten theirs.
        and (line := read_command_line(process.pid))
        and "--type=" not in line
    ]


def processes_on_profile(profile: str) -> Iterator[Process]:
    """Yield processes that name this profile and can reach it.

    Processes of a run do not count: bwrap has the words of the command and is not confined.
    """
    for process in all_processes():
        if (
            names_profile(read_command_line(process.pid), profile)
            and not read_environment(process.pid, having=TASK_ID)
            and reaches_profile(process.pid, profile)
            and not Ancestry().has_supervisor(process)
        ):
            yield process


def reaches_profile(pid: int, folder: str) -> bool:
    """Return whether our directory has the same path for this process. Isolation hides a profile from other shops.

    Links in the root of the process are not followed, because they would be resolved in ours. An unreadable root
    belongs to another user or to a process that hides. Of these only a process of root can open a profile.
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


def read_command_line(pid: int) -> str:
    """Return the command line joined by spaces, as Chromium does with that of its renderers."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").rstrip()
    except OSError:
        return ""


def listens_on(pid: int, port: int) -> bool:
    """Return whether the process, or one of its session, listens on this port.

    The session counts because the process itself may only be the browser's sandbox.
    """
    sockets = _listening_sockets(port)
    return bool(sockets) and any(path in sockets for each in _session_pids(pid) for path in _open_files(each))


def writes_downloads(pid: int, runs: str) -> bool:
    """Return whether the browser has a file of its shop's runs open, maybe a deleted one, or an unfinished download."""
    return any(f"{runs}/" in path or ".crdownload" in path for each in _session_pids(pid) for path in _open_files(each))


def has_listener(port: int) -> bool:
    """Return whether any process listens on this port, also one whose descriptors are hidden."""
    return bool(_listening_sockets(port))


def _session_pids(leader: int) -> Iterator[int]:
    """Yield the leader first: it alone is often enough, and a search in /proc is slow."""
    yield leader
    yield from (each.pid for each in all_processes() if each.session == leader)


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")


def memory_by_session() -> dict[int, int]:
    """Return the resident bytes of each session.

    Chromium's processes share hundreds of MB of code. Shared memory counts once, for the process that has most of it.
    """
    own: Counter[int] = Counter()
    shared: dict[int, int] = {}
    for process in all_processes():
        with suppress(OSError):
            _, resident, common, *_ = map(int, Path(f"/proc/{process.pid}/statm").read_text().split())
            own[process.session] += (resident - common) * PAGE_SIZE
            shared[process.session] = max(shared.get(process.session, 0), common * PAGE_SIZE)
    return {session: used + shared[session] for session, used in own.items()}


def _marker_of(process: Process) -> str:
    return read_environment(process.pid, having=MARKER).get(MARKER, "")


def _listening_sockets(port: int) -> set[str]:
    """Return `socket:[inode]` of each IPv4 socket that listens on the port."""
    wanted = f":{port:04X}"
    with open("/proc/net/tcp", encoding="ascii") as table:
        return {
            f"socket:[{fields[9]}]"
            for line in table
            if (fields := line.split())[3] == "0A" and fields[1].endswith(wanted)
        }


def release_singleton(profile: Path) -> None:
    """Remove the lock unless its owner runs, and the socket's folder, which a killed Chromium leaves.

    Chromium itself removes only the lock of an owner on the same host name, which a former container does not have. The
    browser can write the link to the socket, so no folder outside of the temporary directory is deleted.
    """
    try:
        host, _, pid = os.readlink(profile / "SingletonLock").rpartition("-")
    except OSError:
        return
    if host == socket.gethostname() and pid.isdigit() and names_profile(read_command_line(int(pid)), str(profile)):
        return
    with suppress(OSError):
        folder = Path(os.readlink(profile / "SingletonSocket")).parent
        chromium_made_it = "org.chromium." in folder.name or "com.google.Chrome" in folder.name
        if chromium_made_it and folder.parent == Path(tempfile.gettempdir()) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    for name in SINGLETON_FILES:
        with suppress(OSError):  # a program of the shop can put a directory in its place
            (profile / name).unlink()
