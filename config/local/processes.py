"""The processes of this state directory: started apart from us, found by their command line, ended by their pid.

No pid file is trusted. A file outlives a kill -9 and its number is given to a stranger; the command line that names
our folder belongs to us alone, and it can be read where another account's working directory cannot.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

# The shell leaves at once, so the server is nobody's child here and, killed, leaves no zombie that looks alive.
APART = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'
ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "AFTERTOUCH_RUN"  #: names the run of tests, benchmarks or the demo that a process belongs to (`reaper`)
PLAIN_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC"}


def start_apart(command: Iterable[str], log: Path) -> psutil.Process | None:
    """Run a server in a session of its own. None where it is gone again already."""
    mark = {MARK: os.environ[MARK]} if MARK in os.environ else {}
    shell = subprocess.run(
        ["/bin/sh", "-c", APART, "sh", str(log), *command],
        check=True, capture_output=True, text=True, cwd="/", env=PLAIN_ENVIRONMENT | mark, start_new_session=True,
    )  # fmt: skip
    try:
        return psutil.Process(int(shell.stdout))
    except psutil.NoSuchProcess:
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether it can still do anything: a zombie cannot, however long its parent takes to notice."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def running(program: str, folder: Path) -> psutil.Process | None:
    """The server of that program that names our folder in its command line; its forks do too, so the eldest."""

    def matches(process: psutil.Process) -> bool:
        words = command_line(process)
        return str(folder) in words and any(os.path.basename(word) == program for word in words)

    found = [process for process in psutil.process_iter() if matches(process)]
    return min(found, key=lambda process: float(process.create_time()), default=None)


def carrying(variable: str, value: str) -> list[psutil.Process]:
    """The processes that inherited this variable from us, wherever they have been moved to since."""

    def carries(process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(variable) == value)
        except (psutil.Error, OSError):
            return False

    return [process for process in psutil.process_iter() if process.pid != os.getpid() and carries(process)]


def send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)  # refuses where the pid has been given to another process


def end(process: psutil.Process, *steps: tuple[signal.Signals, float]) -> bool:
    """Send each signal in turn and wait its seconds. Whether the process is gone."""
    for number, seconds in steps:
        send(process, number)
        if wait_until(lambda: not is_alive(process), seconds):
            return True
    return not is_alive(process)


def wait_until(happened: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True


# Below the range from which the kernel takes the ports of outgoing connections: a client that tries to reach a dead
# server on a port of that range can be given the very port and so keep it from coming back.
SERVER_PORTS = range(20_000, 32_000)

# Never the same row of ports in two processes, however the program around us seeds its own chance.
_chance = random.SystemRandom()

_claims = ExitStack()
atexit.register(_claims.close)


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError:
        return False
    return True


def claim(port: int) -> bool:
    """Keep it from all others on this machine that ask here, until this process ends: what is to listen there may take
    a minute to start. An abstract socket, as Linux has them, leaves no file behind."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0aftertouch-port-{port}")
    except OSError:
        mark.close()
        return False
    _claims.enter_context(mark)
    return True


def free_port(preferred: int | None = None) -> int:
    """The preferred port if it is free, else some free one that nobody else has been given.

    The preferred one is not claimed: it is its server's own, which comes back to it.
    """
    if preferred and is_free(preferred):
        return preferred
    while True:
        port = _chance.choice(SERVER_PORTS)
        if is_free(port) and claim(port):
            return port
