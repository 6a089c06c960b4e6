"""Configure, start and call the supervisor that restarts programs, and watch servers and programs."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast
from xmlrpc.client import Error as RpcError
from xmlrpc.client import ServerProxy

import psutil  # type: ignore[import-untyped,unused-ignore]
from jinja2 import StrictUndefined, Template
from supervisor.xmlrpc import SupervisorTransport  # type: ignore[import-untyped,unused-ignore]

from config.environment import ROOT, Environment
from config.local import servers
from config.local.endpoints import EmbeddedServerError, read_endpoints, read_or_create_secret
from config.local.processes import is_alive
from config.local.programs import Program, StackError, program_command

SOCKET_PATH_LIMIT = 90  # bytes; the kernel accepts 107, and the supervisor first binds a longer name

TEMPLATE = Path(__file__).with_name("supervisor.conf.j2")
GROUP = "aftertouch"  # the supervisor stops groups in sequence, but the programs of one group in parallel


def write_configuration(settings: Environment, state_dir: Path, programs: Sequence[Program]) -> Path:
    logs = state_dir / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    # The supervisor expands `%`.
    template = Template(
        TEMPLATE.read_text(), undefined=StrictUndefined, finalize=lambda value: str(value).replace("%", "%%")
    )
    path = state_dir / "supervisor.conf"
    path.touch(mode=0o600)
    path.write_text(
        template.render(
            root=ROOT, logs=logs, state=state_dir, root_user=os.geteuid() == 0, group=GROUP,
            socket=socket_path(state_dir), password=read_or_create_secret(state_dir, "supervisor"),
            programs=[(each.name, program_command(each, settings), each.stop_within) for each in programs],
        )
    )  # fmt: skip
    return path


def socket_path(state_dir: Path) -> Path:
    """Return a path in the state directory, or in a short temporary folder if the path exceeds the limit."""
    path = state_dir / "supervisor.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_LIMIT:
        return path
    name = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"aftertouch-{os.geteuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise StackError(f"{folder} belongs to another user; set AFTERTOUCH_STATE_DIR to a folder with a shorter path")
    return folder / "supervisor.sock"


def parent_death_prefix() -> list[str]:
    """Return the command prefix that sends SIGTERM to a child when this process is killed."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig=TERM"] if setpriv else []


def start_supervisor(configuration: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with (configuration.parent / "logs" / "supervisor.err").open("wb") as complaints:
        return subprocess.Popen(
            [*parent_death_prefix(), sys.executable, "-m", "config.local.supervisord", "-c", str(configuration)],
            cwd=ROOT, env=dict(environment), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=complaints, stderr=complaints,
        )  # fmt: skip


class Supervisor:
    """Calls to the running supervisor. Each call opens its own connection."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir

    def ask(self, method: str, *arguments: object) -> Any:
        transport = SupervisorTransport(
            "aftertouch", read_or_create_secret(self.state_dir, "supervisor"), f"unix://{socket_path(self.state_dir)}"
        )
        with ServerProxy("http://127.0.0.1", transport=transport) as proxy:
            return getattr(proxy.supervisor, method)(*arguments)

    def programs(self) -> dict[str, dict[str, Any]]:
        """Return state and pid by program name."""
        return {row["name"]: row for row in cast(list[dict[str, Any]], self.ask("getAllProcessInfo"))}

    def states(self) -> dict[str, str]:
        return {name: str(row["statename"]) for name, row in self.programs().items()}

    def pids(self) -> dict[str, int]:
        return pids_of(self.programs())

    def start(self, program: str) -> None:
        self.ask("startProcess", f"{GROUP}:{program}")

    def stop(self, program: str) -> None:
        self.ask("stopProcess", f"{GROUP}:{program}")

    def restart(self, program: str) -> None:
        if self.states()[program] in ("RUNNING", "STARTING", "BACKOFF"):
            self.stop(program)
        self.start(program)


def kill_process_group(leader: int) -> None:
    """Kill the rest of a killed program's process group. The group keeps its number while it has members."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def pids_of(programs: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return the pids of running programs."""
    return {name: int(row["pid"]) for name, row in programs.items() if row["pid"]}


STOPPED_STATES = ("FATAL", "EXITED")


class StackWatch:
    def __init__(self, state_dir: Path, start_servers: Callable[[], None], print_line: Callable[[str], None]) -> None:
        self.state_dir = state_dir
        self.start_servers = start_servers
        self.print_line = print_line
        self.supervisor = Supervisor(state_dir)
        self.servers = self.running_servers()
        self.pids: dict[str, int] = {}

    def check_stack(self) -> None:
        self.revive_servers()
        try:
            programs = self.supervisor.programs()
            self.end_orphaned_children(pids_of(programs))
            self.restart_given_up([name for name, row in programs.items() if row["statename"] in STOPPED_STATES])
        except (OSError, HTTPException, RpcError):
            return  # the supervisor is busy or ending; its owner handles that

    def running_servers(self) -> dict[str, psutil.Process]:
        return {label: psutil.Process(pid) for label, pid in servers.server_pids(self.state_dir).items() if pid}

    def revive_servers(self) -> None:
        dead = [label for label, process in self.servers.items() if not is_alive(process)]
        before = read_endpoints(self.state_dir)
        if not dead or before is None:  # without addresses the servers were stopped on purpose
            return
        self.print_line(f"{' and '.join(dead)} died; started again")
        try:
            self.start_servers()
        except EmbeddedServerError as error:
            self.print_line(str(error))
            return
        self.servers = self.running_servers()
        if read_endpoints(self.state_dir) != before:
            for program in self.supervisor.states():
                self.supervisor.restart(program)

    def end_orphaned_children(self, now: dict[str, int]) -> None:
        """End child processes of killed programs. They would keep the port and the messages from the restarted
        program.
        """
        for program, pid in self.pids.items():
            if now.get(program) != pid:
                self.print_line(f"{program} (pid {pid}) ended")
                kill_process_group(pid)
        self.pids = now

    def restart_given_up(self, programs: list[str]) -> None:
        for program in programs:
            self.print_line(f"{program} keeps ending, see {self.state_dir / 'logs' / program}.log; it is tried again")
            self.supervisor.start(program)
