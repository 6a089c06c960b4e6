"""Run an isolated stack for the demo and tests: own servers, free ports, own state directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from config.environment import ROOT
from config.local import processes, servers, stack
from config.local.endpoints import Endpoints, read_endpoints
from config.local.processes import is_alive, select_port
from config.local.stack import PROGRAMS, StackError, stop_time_limit

READY_WITHIN = 600.0  # seconds; a stack that ends is detected at once
WORKER_WITHIN = 90.0  # seconds after the web process is live
# Servers named in the environment are not used for experiments; `env` may name them explicitly.
NOT_INHERITED = (
    "DATABASE_URL", "REDIS_URL", "CELERY_BROKER_URL", "AFTERTOUCH_SESSIONS_REDIS_URL",
    "AFTERTOUCH_BASE_URL", "AFTERTOUCH_HOST", "DJANGO_SETTINGS_MODULE",
)  # fmt: skip


@dataclass
class RunningStack:
    state_dir: Path
    base_url: str
    flower_url: str
    environment: dict[str, str] = field(repr=False)

    @property
    def endpoints(self) -> Endpoints:
        found = read_endpoints(self.state_dir)
        return Endpoints(
            self.environment.get("DATABASE_URL") or (found.database_url if found else ""),
            self.environment.get("REDIS_URL") or (found.redis_url if found else ""),
        )

    @property
    def pids(self) -> dict[str, int]:
        """Return the pids of running programs."""
        running: dict[str, int] = {}
        noted: dict[str, int] = json.loads(stack.stack_note(self.state_dir).read_text())["pids"]
        for name, pid in noted.items():
            with suppress(psutil.NoSuchProcess):
                if is_alive(psutil.Process(pid)):
                    running[name] = pid
        return running

    @property
    def server_pids(self) -> dict[str, int]:
        """Return the pids of "PostgreSQL" and "Valkey" while they run."""
        return {label: pid for label, pid in servers.server_pids(self.state_dir).items() if pid}

    def kill(self, program: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a program or server. Returns its pid."""
        pid = {**self.pids, **self.server_pids}[program]
        os.kill(pid, number)
        return pid

    def stop(self, program: str) -> None:
        """Stop the program and wait. It stays stopped until `start`."""
        held = stack.held_programs(self.state_dir)
        held.mkdir(exist_ok=True)
        (held / program).touch()
        self.wait_until(lambda: program not in self.pids, stop_time_limit(PROGRAMS), f"the end of {program}")

    def start(self, program: str) -> None:
        (stack.held_programs(self.state_dir) / program).unlink(missing_ok=True)
        self.wait_until(lambda: program in self.pids, WORKER_WITHIN, f"the start of {program}")

    def restart(self, program: str) -> None:
        self.stop(program)
        self.start(program)

    def manage(self, *words: str) -> str:
        """Run manage.py against this stack. Returns its output."""
        return subprocess.run(
            [sys.executable, str(ROOT / "manage.py"), *words],
            cwd=ROOT, env=self.environment, text=True, check=True, stdout=subprocess.PIPE,
        ).stdout  # fmt: skip

    def log(self, program: str) -> str:
        return (self.state_dir / "logs" / f"{program}.log").read_text(errors="replace")

    def await_worker(self, name: str) -> None:
        """Wait for a worker. On a loaded machine it starts later than the web process."""
        self.wait_until(lambda: " ready." in self.log(name), WORKER_WITHIN, f"the start of {name}")

    def wait_until(self, happened: Callable[[], bool], timeout: float, what: str = "it") -> None:
        if not processes.wait_until(happened, timeout):
            raise StackError(f"{what} has not happened within {timeout:g} s; logs in {self.state_dir / 'logs'}")


@contextmanager
def running_stack(
    env: Mapping[str, str] | None = None, programs: Sequence[str] | None = None, state_dir: Path | None = None
) -> Iterator[RunningStack]:
    """Start servers and programs (all, or those named), yield when they are live, and stop all at the end.

    Without a state directory, creates a temporary one and deletes it at the end.
    """
    folder = (state_dir or Path(tempfile.mkdtemp(prefix="aftertouch-"))).resolve()
    servers.open_state_dir(folder)
    (folder / "logs").mkdir(mode=0o700, exist_ok=True)
    note = stack.stack_note(folder)
    note.unlink(missing_ok=True)
    environment = stack_environment(env or {}, folder)
    output = folder / "logs" / "stack.log"
    output.unlink(missing_ok=True)
    with output.open("ab") as log:  # the owner may truncate it
        owner = subprocess.Popen(
            [*processes.parent_death_prefix(), sys.executable, "-m", "config.local", "run", *(programs or [])],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        processes.wait_until(lambda: note.exists() or owner.poll() is not None, READY_WITHIN)
        if not note.exists():
            raise StackError("the stack does not start:\n" + output.read_text(errors="replace"))
        addresses = json.loads(note.read_text())
        yield RunningStack(folder, addresses["base_url"], addresses["flower_url"], environment)
    finally:
        owner.terminate()
        try:
            owner.wait(stack.OWNER_WITHIN)
        except subprocess.TimeoutExpired:
            owner.kill()
            owner.wait()
        stack.stop_stack(folder)  # a killed owner could not stop its processes
        if state_dir is None:
            shutil.rmtree(folder, ignore_errors=True)


def stack_environment(env: Mapping[str, str], state_dir: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    ports = {"AFTERTOUCH_PORT": str(select_port()), "AFTERTOUCH_FLOWER_PORT": str(select_port())}
    return {**inherited, **ports, **env, "AFTERTOUCH_STATE_DIR": str(state_dir)}
