"""Client of the supervisor process: send an order, receive events, ensure the end of the command.

    with SupervisedCommand(order) as supervised:
        while not isinstance(event := supervised.next_event(timeout=1), CommandResult):
            ...  # renew the lease, then supervised.extend(until); supervised.stop("cancelled")

Leaving the block early ends the command and waits for its end.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

import structlog

from rpa_tasks.outcomes import CommandResult, ExitCause
from rpa_tasks.supervisor import processes
from rpa_tasks.supervisor.output import TAIL_CHARACTERS, decode_tail
from rpa_tasks.supervisor.processes import adopt_orphans
from rpa_tasks.supervisor.protocol import Inbox, pack_line
from rpa_tasks.supervisor.runs import LEASE_NO, MARKERS, SWEEP_GRACE, TASK_ID, Ancestry, read_supervisor_markers

log = structlog.get_logger(__name__)

SCRIPT = Path(__file__).with_name("main.py")
#: Seconds beyond its expected end after which a supervisor process counts as lost.
OVERDUE_AFTER = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run of one command. Fields that may be secret are not in its `repr`."""

    argv: Sequence[str] = field(repr=False)
    #: The complete environment of the command, with the markers.
    env: Mapping[str, str] = field(repr=False)
    #: Seconds until SIGTERM; SIGKILL follows `hard_after` seconds later.
    timeout: float
    log_path: str
    #: Working directory; empty means the command's HOME.
    cwd: str = ""
    #: Secrets to hide in log and events; those shorter than four characters are ignored.
    mask: Sequence[str] = field(default=(), repr=False)
    hard_after: float = 50.0
    #: Seconds between SIGTERM and SIGKILL for an end other than the timeout.
    grace: float = 15.0
    #: As in `SupervisedCommand.extend`: by `clock()`, counted from the instant before the claim; infinite: no lease.
    extend_until: float
    #: Words before the command: its sandbox, see `rpa_tasks.isolation`.
    prefix: Sequence[str] = ()

    def line(self) -> bytes:
        # The supervisor process has another working directory.
        paths = {
            "log_path": os.path.abspath(self.log_path),
            "cwd": os.path.abspath(self.cwd or self.env.get("HOME", "/")),
        }
        lists = {"argv": list(self.argv), "env": dict(self.env), "mask": list(self.mask), "prefix": list(self.prefix)}
        return pack_line({each.name: getattr(self, each.name) for each in fields(self)} | lists | paths)


@dataclass(frozen=True, slots=True)
class Started:
    """The program was entered by exec."""

    pid: int


class Progress(NamedTuple):
    fraction: float  #: 0 to 1
    message: str  #: at most 200 characters, may be empty


Event = Started | Progress | CommandResult


class SupervisedCommand:
    """A command under a supervisor process. The constructor starts it.

    A command that cannot be started raises nothing: its `CommandResult` has the reason.
    """

    def __init__(self, order: RunSpec) -> None:
        self._order = order
        self._pid: int | None = None
        self._adopted_pids: set[int] = set()
        self._result: dict[str, Any] | None = None
        self._ending: CommandResult | None = None
        self._events: deque[Event] = deque()
        self._in = -1
        self._overdue_at = time.monotonic() + order.timeout + order.hard_after + OVERDUE_AFTER
        line = order.line()
        try:
            # Start it without our terminal and environment. The markers of its run are in its command line.
            marks = [f"{name}={order.env[name]}" for name in MARKERS if name in order.env]
            self._process = subprocess.Popen(  # noqa: S603  (our own script)
                [sys.executable, "-I", "-S", str(SCRIPT), *marks],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd="/",
                env={"LANG": "C.UTF-8"},
                start_new_session=True,
            )
        except OSError as error:
            log.exception("supervisor_not_started")
            self._ending = CommandResult(ExitCause.NOT_STARTED, error="supervisor_not_started", tail=str(error))
            return
        # If the supervisor process is killed, its adopted processes become ours instead of init's. It has none before
        # its order.
        self._adopted_before = adopt_orphans()
        guard = processes.read_process(self._process.pid)
        self._began = guard.started if guard else 0
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._inbox = Inbox(self._process.stdout.fileno())
        os.set_blocking(self._inbox.descriptor, False)
        self._write(line)
        os.set_blocking(self._in, False)  # from here on a stopped supervisor process must not block the runner

    def next_event(self, timeout: float) -> Event | None:
        """Return the next event, or None after `timeout` seconds.

        `CommandResult` is the last event and is returned again by each later call. All processes of the command have
        ended then, except the number in `survivors`.
        """
        until = time.monotonic() + timeout
        while not self._events:
            if self._ending is not None:
                return self._ending
            self._read(max(0.0, until - time.monotonic()))
            if not self._events and time.monotonic() >= until:
                return None
        return self._events.popleft()

    def extend(self, until: float) -> None:
        """Let the command run until `until`, by `protocol.clock`.

        Count from the instant before the renewal is requested: PostgreSQL counts from a later instant, that of the
        renewal.
        """
        self._write(pack_line({"extend_until": until}))

    def stop(self, why: str) -> None:
        """Request the end of the command, with "cancelled" or "node_stopping".

        The `CommandResult` follows. The first reason counts.
        """
        self._overdue_at = min(self._overdue_at, time.monotonic() + self._order.grace + OVERDUE_AFTER)
        self._write(pack_line({"stop": why}))

    def close(self) -> CommandResult:
        """End the command if it runs, and wait for it: at most the grace and a little more."""
        if self._ending is None:
            self.stop("runner_lost")
        while self._ending is None:
            self.next_event(timeout=1)
        return self._ending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- events of the supervisor -----------------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        """Write the whole line. A lost or stopped supervisor process loses it, which is harmless."""
        try:
            while line and self._in >= 0:
                line = line[os.write(self._in, line) :]
        except (BrokenPipeError, BlockingIOError):
            pass

    def _read(self, timeout: float) -> None:
        poll = select.poll()
        poll.register(self._inbox.descriptor, select.POLLIN)
        if not poll.poll(min(timeout, 1.0) * 1000):
            if time.monotonic() >= self._overdue_at:
                self._end_unsupervised("overdue")
            return
        for event in self._inbox.receive():
            self._note(event)
        if self._inbox.closed and self._ending is None:
            self._end_unsupervised("vanished")

    def _note(self, event: dict[str, Any]) -> None:
        if "started" in event:
            self._pid = event["started"]
            self._events.append(Started(event["started"]))
        elif "progress" in event:
            self._events.append(Progress(event["progress"], event["message"]))
        elif "result" in event:
            self._result = event["result"]
        else:
            self._end(ExitCause(event.pop("ended")), **event)

    def _end(self, ended: ExitCause, **details: Any) -> None:
        adopt_orphans(self._adopted_before)
        self._ending = CommandResult(ended, result=self._result, **details)
        self._events.append(self._ending)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._in = -1

    def _end_unsupervised(self, how: str) -> None:
        """End a run whose supervisor process is lost or overdue.

        The kernel kills the command with its supervisor process. Its descendants must be ended here.
        """
        self._process.kill()
        self._process.wait()
        log.error("supervisor_lost", how=how, guard=self._process.pid, command=self._pid)
        left = processes.end_processes(self._family, SWEEP_GRACE)
        for pid in self._adopted_pids:  # otherwise they would stay zombies
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        tail = b""
        with suppress(OSError), open(self._order.log_path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * TAIL_CHARACTERS))
            tail = file.read()
        self._end(ExitCause.SUPERVISOR_LOST, survivors=len(left), tail=decode_tail(tail))

    def _family(self) -> list[processes.Process]:
        """Find what the command has left: its session, processes with the run's environment, and adopted ones.

        Adopted are children of this process that it did not start, since the supervisor process started.
        """
        ancestry = Ancestry()
        marks = {name: self._order.env.get(name) for name in (TASK_ID, LEASE_NO)}  # None fits no process
        found: dict[int, processes.Process] = {}
        for process in processes.all_processes():
            is_child = process.parent == os.getpid() and process.pid != self._process.pid
            if is_child and process.started >= self._began and read_supervisor_markers(process.pid) is None:
                self._adopted_pids.add(process.pid)
                found |= {each.pid: each for each in (process, *processes.list_descendants(process.pid))}
            elif self._pid in (process.session, process.group) or (
                marks.items() <= processes.read_environment(process.pid, having=TASK_ID).items()
                and not ancestry.has_supervisor(process)
            ):
                found[process.pid] = process
        return list(found.values())
