"""A node whose programs run from a checkout of its own, started and stopped as systemd does."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from config.local.processes import select_port, wait_until
from config.local.stack import PROGRAMS
from tests.faults.workers import Program
from tests.support.waiting import WAIT_LIMIT

UNITS = ("web", "core", "ticks", "long", "execution", "beat")


@dataclass
class Machine:
    """With a state folder and a port of its own."""

    name: str
    tree: Path
    folder: Path
    environment: dict[str, str] = field(repr=False)
    port: int = field(default_factory=select_port)
    programs: dict[str, Program] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def manage(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *words], cwd=self.tree, env=self._environment, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *names: str) -> None:
        """All of them, then wait for all."""
        for name in names:
            self.programs[name] = self._run(name)
        for name in names:
            if name == "web":
                assert wait_until(self._answers, WAIT_LIMIT, pause=0.2), self.programs[name].log
            elif name != "beat":
                self.programs[name].await_log(" ready.", WAIT_LIMIT)

    def stop(self, *names: str) -> None:
        """Stop like systemd: SIGTERM to the main process, which ends its children."""
        for name in names:
            os.kill(self.programs[name].pid, signal.SIGTERM)
        for name in names:
            self.programs[name].await_exit(WAIT_LIMIT)
            del self.programs[name]

    def end(self) -> None:
        for program in self.programs.values():
            program.process.terminate()
        for program in self.programs.values():
            with suppress(subprocess.TimeoutExpired):
                program.process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.process.wait(10)

    def log(self, name: str) -> str:
        return "".join(each.read_text(errors="replace") for each in self._logs.glob(f"{self.name}-{name}-*.log"))

    @property
    def _logs(self) -> Path:
        return self.folder.parent / "logs"

    @property
    def _environment(self) -> dict[str, str]:
        ours = {
            "AFTERTOUCH_STATE_DIR": str(self.folder), "AFTERTOUCH_NODE": self.name, "AFTERTOUCH_PORT": str(self.port),
            "AFTERTOUCH_BASE_URL": self.base_url, "AFTERTOUCH_RPA_WARM_BROWSERS": "0", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        return {**self.environment, **ours}

    def _run(self, name: str) -> Program:
        (words,) = (program.words for program in PROGRAMS if program.name == name)
        words = words.format(host="127.0.0.1", port=self.port, web_workers=1, worker_concurrency=2, rpa_slots=2)
        unique = ["-n", f"{name}@{self.name}"] if " worker " in words else []
        path = self._logs / f"{self.name}-{name}-{time.time_ns()}.log"
        with path.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *shlex.split(words), *unique],
                cwd=self.tree, env=self._environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                start_new_session=True,
            )  # fmt: skip
        return Program(process, path)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health/live", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False
