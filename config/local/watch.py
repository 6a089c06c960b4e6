"""What the supervisor does not see to: the servers, programs it gave up, and what a killed program left behind."""

from __future__ import annotations

from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from xmlrpc.client import Error as RpcError

import psutil  # type: ignore[import-untyped,unused-ignore]

from config.local import servers
from config.local.endpoints import read_endpoints
from config.local.processes import is_alive
from config.local.server_errors import EmbeddedServerError
from config.local.supervisor import Supervisor, end_group, pids_of

GIVEN_UP = ("FATAL", "EXITED")


class Watch:
    def __init__(self, state_dir: Path, start_servers: Callable[[], None], say: Callable[[str], None]) -> None:
        self.state_dir = state_dir
        self.start_servers = start_servers
        self.say = say
        self.supervisor = Supervisor(state_dir)
        self.servers = self.running_servers()
        self.pids: dict[str, int] = {}

    def look(self) -> None:
        self.revive_servers()
        try:
            programs = self.supervisor.programs()
            self.end_what_the_killed_left(pids_of(programs))
            self.start_what_was_given_up([name for name, row in programs.items() if row["statename"] in GIVEN_UP])
        except (OSError, HTTPException, RpcError):
            return  # the supervisor is busy or ending; its owner looks at that

    def running_servers(self) -> dict[str, psutil.Process]:
        return {label: psutil.Process(pid) for label, pid in servers.status(self.state_dir).items() if pid}

    def revive_servers(self) -> None:
        dead = [label for label, process in self.servers.items() if not is_alive(process)]
        before = read_endpoints(self.state_dir)
        if not dead or before is None:  # without addresses somebody stopped them on purpose
            return
        self.say(f"{' and '.join(dead)} died; started again")
        try:
            self.start_servers()
        except EmbeddedServerError as error:
            self.say(str(error))
            return
        self.servers = self.running_servers()
        if read_endpoints(self.state_dir) != before:
            for program in self.supervisor.states():
                self.supervisor.restart(program)

    def end_what_the_killed_left(self, now: dict[str, int]) -> None:
        """A killed program's own children would keep its port, and its messages, from the one started in its place."""
        for program, pid in self.pids.items():
            if now.get(program) != pid:
                self.say(f"{program} (pid {pid}) ended")
                end_group(pid)
        self.pids = now

    def start_what_was_given_up(self, programs: list[str]) -> None:
        for program in programs:
            self.say(f"{program} keeps ending, see {self.state_dir / 'logs' / program}.log; it is tried again")
            self.supervisor.start(program)
