"""Start, find and end processes of this state directory, and choose ports.

Processes are found by their command line. A pid file survives a kill -9 and its number may be reused. A command line
with this folder is unique, and it is readable where another account's working directory is not.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped,unused-ignore]

# The shell exits at once. The server then has no parent here and leaves no zombie that looks alive.
DETACH_SCRIPT = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'
ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "AFTERTOUCH_RUN"  #: names the run of tests, benchmarks or the demo of a process (`reaper`)
PLAIN_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC"}


def start_detached(command: Iterable[str], log: Path) -> psutil.Process | None:
    """Start a server in its own session. Returns None if it has already ended."""
    mark = {MARK: os.environ[MARK]} if MARK in os.environ else {}
    shell = subprocess.run(
        ["/bin/sh", "-c", DETACH_SCRIPT, "sh", str(log), *command],
        check=True, capture_output=True, text=True, cwd="/", env=PLAIN_ENVIRONMENT | mark, start_new_session=True,
    )  # fmt: skip
    try:
        return psutil.Process(int(shell.stdout))
    except psutil.NoSuchProcess:
        return None


def parent_death_prefix() -> list[str]:
    """Return the command prefix that sends SIGTERM to a child when this process is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig=TERM"] if setpriv else []


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs. A zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def command_line_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def find_server(program: str, folder: Path) -> psutil.Process | None:
    """Return the server of this program with this folder in its command line. Its forks match too, so the oldest."""

    def matches(process: psutil.Process) -> bool:
        words = command_line_of(process)
        return str(folder) in words and any(os.path.basename(word) == program for word in words)

    found = [process for process in psutil.process_iter() if matches(process)]
    return min(found, key=lambda process: float(process.create_time()), default=None)


def processes_with_variable(variable: str, value: str) -> list[psutil.Process]:
    """Return the running processes that inherited this variable, regardless of session or parent."""

    def carries(process: psutil.Process) -> bool:
        return process.pid != os.getpid() and environment_of(process).get(variable) == value and is_alive(process)

    return [process for process in psutil.process_iter() if carries(process)]


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment that the process started with; empty if it cannot be read."""
    try:
        return dict(process.environ())
    except (psutil.Error, OSError):
        return {}


def send_signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)  # psutil refuses a pid that now belongs to another process


def end_process(process: psutil.Process, *steps: tuple[signal.Signals, float]) -> bool:
    """Send each signal in turn and wait its seconds. Returns whether the process ended."""
    for number, seconds in steps:
        send_signal(process, number)
        if wait_until(lambda: not is_alive(process), seconds):
            return True
    return not is_alive(process)


def kill_leftovers(find: Callable[[], list[psutil.Process]], seconds: float) -> list[psutil.Process]:
    """Wait for processes that got a signal to end, then kill them in rounds, because a process may start another.

    Returns those that did not end.
    """
    wait_until(lambda: not find(), seconds, pause=0.2)
    for _ in range(10):
        if not (left := find()):
            return []
        for process in left:
            end_process(process, (signal.SIGKILL, 2.0))
    return find()


def open_lock_file(path: Path) -> IO[str]:
    """Open a file to lock, which no other account can open: a reader can hold the lock too."""
    file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "a+")  # noqa: SIM115  (the caller closes it)
    os.fchmod(file.fileno(), 0o600)
    return file


def try_lock(file: IO[str]) -> bool:
    """Lock the file unless another process has. The lock ends with this process and is not inherited."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def tail_of(log: Path, count: int) -> list[str]:
    """Return the last lines, indented. Without a log, none."""
    if not log.exists():
        return []
    return [f"  {line}" for line in log.read_text(errors="replace").splitlines()[-count:]]


def wait_until(happened: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Return whether it happened within `seconds`. Pauses grow to half a second: asking takes the processor too."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.1 * pause, max(pause, 0.5))
    return True


# Below the kernel's range for outgoing connections. Otherwise a client that connects to a dead server's port can be
# given that port itself, and block the server's restart.
SERVER_PORTS = range(20_000, 32_000)

# Two processes must not draw the same ports, even if the program seeds `random`.
_random = random.SystemRandom()

_reservations = ExitStack()
atexit.register(_reservations.close)


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError:
        return False
    return True


def reserve_port(port: int) -> bool:
    """Reserve the port against other callers on this machine until this process ends. Its server may need a minute to
    start.

    Uses an abstract socket of Linux, which leaves no file.
    """
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0aftertouch-port-{port}")
    except OSError:
        mark.close()
        return False
    _reservations.enter_context(mark)
    return True


def select_port(preferred: int | None = None) -> int:
    """Return the preferred port if it is free, else a free port that no other caller has reserved.

    The preferred port is not reserved, because its own server returns to it.
    """
    if preferred and is_port_free(preferred):
        return preferred
    while True:
        port = _random.choice(SERVER_PORTS)
        if is_port_free(port) and reserve_port(port):
            return port
