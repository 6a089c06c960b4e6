"""Celery programs of our own beside those of the stack."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from config.environment import ROOT
from config.local.processes import wait_until
from tests.support.waiting import WAIT_LIMIT


@dataclass
class Program:
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def await_log(self, text: str, timeout: float = WAIT_LIMIT, *, times: int = 1) -> None:
        wait_until(lambda: self.log.count(text) >= times or self.process.poll() is not None, timeout)
        assert self.log.count(text) >= times, f"{text!r} is not in the log (exit {self.process.poll()}):\n{self.log}"

    def await_ready(self) -> None:
        self.await_log(" ready.")

    def await_exit(self, timeout: float = WAIT_LIMIT) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still alive after {timeout:g} s:\n{self.log}") from None

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Main process and children, at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_LIMIT)


@contextmanager
def celery(environment: Mapping[str, str], *words: str, app: str = "config", log: str = "celery") -> Iterator[Program]:
    folder = Path(environment["AFTERTOUCH_STATE_DIR"]) / "logs"
    folder.mkdir(exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{log}-", suffix=".log", dir=folder)
    with os.fdopen(handle, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", *words],
            cwd=ROOT, env={**environment, "APP": app, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
        )  # fmt: skip
    program = Program(process, Path(name))
    try:
        yield program
    finally:
        if program.is_alive():
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_LIMIT)


@contextmanager
def worker(environment: Mapping[str, str], *words: str, app: str = "config", log: str = "worker") -> Iterator[Program]:
    plain = ("--without-gossip", "--without-mingle", "-l", "INFO")
    with celery(environment, "worker", *words, *plain, app=app, log=log) as program:
        yield program
