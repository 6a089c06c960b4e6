"""Start an embedded server. A start repairs the state after a kill -9 of the server or its starter."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from config.local.account import Account
from config.local.endpoints import EmbeddedServerError, PasswordRefusedError
from config.local.processes import command_line_of, find_server, is_alive, select_port, start_detached, tail_of

RETRY_FOR = 15.0  # seconds; children, lock file and shared memory of a killed server are gone earlier
ANSWER_WITHIN = 120.0  # seconds; crash recovery replays the log before the first answer
REFUSED_FOR = 2.0  # seconds; another server on the port answers the same, until the new one fails to bind and exits
LOG_LIMIT = 10 * 1024 * 1024


def package_folders(package: Path) -> list[Path]:
    """Return the folder of an installed wheel, and that of its libraries if it has any."""
    libraries = package.with_name(f"{package.name}.libs")
    return [package, libraries] if libraries.is_dir() else [package]


class Server(ABC):
    program: str  # name of the binary
    label: str
    port_option: str

    def __init__(self, state_dir: Path, account: Account) -> None:
        self.state_dir = state_dir
        self.account = account
        self.folder = state_dir / self.program.split("-")[0]
        self.log = state_dir / "logs" / f"{self.folder.name}.log"

    @abstractmethod
    def prepare(self) -> None:
        """Create the files that a start needs, once, and remove those of a crash."""

    @abstractmethod
    def command(self, port: int) -> list[str]: ...

    @abstractmethod
    def programs(self) -> list[Path]:
        """Return the folders that the server needs next to its own: those of its programs and libraries."""

    @abstractmethod
    def marker(self) -> Path:
        """Return the path that only this server has in its command line."""

    @abstractmethod
    def url(self, port: int) -> str: ...

    @abstractmethod
    def prove(self, port: int) -> None:
        """Query the server with its password. Raises on a wrong or missing answer."""

    @abstractmethod
    def is_refusal(self, error: Exception) -> bool:
        """Return whether the error is a rejected password."""

    @abstractmethod
    def stop(self) -> None: ...

    @cached_property
    def becoming(self) -> tuple[str, ...]:
        """Return the words that start a program of the server as its account. The server's folder exists."""
        return self.account.becoming(*self.programs(), self.folder)

    def process(self) -> psutil.Process | None:
        return find_server(self.program, self.marker())

    def port_of(self, process: psutil.Process) -> int | None:
        words = command_line_of(process)
        return int(words[words.index(self.port_option) + 1]) if self.port_option in words else None

    def last_port(self) -> int | None:
        try:
            return int((self.state_dir / f"{self.folder.name}.port").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def remember_port(self, port: int) -> None:
        (self.state_dir / f"{self.folder.name}.port").write_text(str(port))

    def start(self) -> str:
        """Start the server unless it runs. Returns its address after a successful query."""
        while (process := self.process()) is not None:
            port = self.port_of(process)
            try:
                if port is not None and self.answers(port, process):
                    return self.url(port)
            except PasswordRefusedError:
                self.stop()
        self.make_folder()
        return self.url(self.start_with_retries())

    def make_folder(self) -> None:
        self.folder.mkdir(mode=0o755, exist_ok=True)
        self.log.parent.mkdir(mode=0o700, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LOG_LIMIT:
            self.log.replace(self.log.with_suffix(".log.1"))

    def start_with_retries(self) -> int:
        deadline, pause = time.monotonic() + RETRY_FOR, 0.1
        while True:
            self.prepare()
            port = select_port(self.last_port())
            self.remember_port(port)
            process = start_detached([*self.becoming, *self.command(port)], self.log)
            if process is not None and self.answers(port, process):
                return port
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
                if waited >= REFUSED_FOR and self.is_refusal(error):
                    raise PasswordRefusedError(
                        f"{where} refuses the password in {self.state_dir / 'secrets'}; "
                        "bring that file back, or remove the state folder and lose its data"
                    ) from error
                if waited >= ANSWER_WITHIN:
                    raise EmbeddedServerError(f"{where} runs but does not answer: {error}") from error
                time.sleep(0.05)
            else:
                return True
