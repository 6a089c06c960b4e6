"""Real commands for the guard, and the means to see what is left of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings

from config.environment import ROOT
from rpa_tasks.outcomes import CommandResult
from rpa_tasks.supervisor import processes
from rpa_tasks.supervisor.client import Event, Progress, RunSpec, Started, SupervisedCommand
from rpa_tasks.supervisor.runs import LEASE_NO, SHOP, STATE_DIR, TASK_ID
from tests.support.waiting import WAIT_LIMIT, eventually

LONG = 1000.0  #: seconds: no limit of a command ends before the test, unless the test sets it

#: Leaves its parent, its session and its group, and then writes its file.
DAEMON = """
import os, sys, time, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if "stubborn" in sys.argv:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        with open(sys.argv[1] + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


#: Starts a process that ignores SIGTERM, and short ones all the time, with the given variables as their environment.
FORGER = """
import subprocess, sys, time
variables = dict(word.split("=", 1) for word in sys.argv[1:])
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
words = [sys.executable, "-c", stubborn]
first = subprocess.Popen(words, env=variables, start_new_session=True, stdout=subprocess.PIPE)
first.stdout.readline()
print('{"progress": 0, "message": "ready"}', flush=True)
short = []
while True:
    short = [each for each in short if each.poll() is None]
    short.append(subprocess.Popen(["/bin/sleep", "0.5"], env=variables, start_new_session=True))
    time.sleep(0.05)
"""
#: Without one a flow shares the uid and the pid namespace of its node. With one it shares the uid.
SANDBOXES = ("none", "bubblewrap")


class TaskCommands:
    """Builds orders that share one task, and looks for its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task_id = str(uuid4())

    @property
    def log(self) -> Path:
        return self.folder / "run.log"

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            TASK_ID: self.task_id,
            LEASE_NO: "7",
            SHOP: "pdd/s1",
            STATE_DIR: str(settings.AFTERTOUCH_STATE_DIR),
        }

    def order(self, *argv: str, **changes: Any) -> RunSpec:
        usual = {"env": self.env, "log_path": str(self.log), "timeout": LONG, "extend_until": float("inf")}
        return RunSpec(**{"argv": argv} | usual | changes)

    def shell(self, script: str, **changes: Any) -> RunSpec:
        return self.order("/bin/sh", "-c", script, **changes)

    def python(self, script: str, *arguments: str, **changes: Any) -> RunSpec:
        return self.order(sys.executable, "-c", script, *arguments, **changes)

    def prefix(self, sandbox: str) -> list[str]:
        """The words that start a command in this sandbox. Its namespaces are those of `rpa_tasks.isolation`."""
        if sandbox == "none":
            return []
        if not shutil.which("bwrap"):
            pytest.skip("missing service: bubblewrap")
        words = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--die-with-parent"]
        return [*words, "--dev-bind", "/", "/", "--proc", "/proc", "--"]

    def pids(self) -> list[int]:
        """Of all that carry the marker of this task and can still do anything."""
        return [
            process.pid
            for process in processes.all_processes()
            if processes.read_environment(process.pid).get(TASK_ID) == self.task_id
        ]

    def clean_up(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


def run_to_end(order: RunSpec) -> tuple[list[Event], CommandResult]:
    """Run the command to its end. Return all events and the result."""
    with SupervisedCommand(order) as supervised:
        return read_to_end(supervised)


def read_to_end(supervised: SupervisedCommand) -> tuple[list[Event], CommandResult]:
    heard: list[Event] = []
    until = time.monotonic() + WAIT_LIMIT
    while time.monotonic() < until:
        event = supervised.next_event(1)
        if isinstance(event, CommandResult):
            return heard, event
        if event is not None:
            heard.append(event)
    raise AssertionError(f"no end within {WAIT_LIMIT:g} s, but {heard}")


def wait_for_start(supervised: SupervisedCommand) -> int:
    event = supervised.next_event(WAIT_LIMIT)
    assert isinstance(event, Started), event
    return event.pid


def wait_for_message(supervised: SupervisedCommand, message: str) -> None:
    """Wait until the command reports this message."""
    eventually(lambda: isinstance(event := supervised.next_event(1), Progress) and event.message == message)


def is_alive(pid: int) -> bool:
    process = processes.read_process(pid)
    return process is not None and not process.gone


def supervisor_of(command: int) -> int:
    process = processes.read_process(command)
    assert process is not None
    return process.parent


RUNNER = """
import json, os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings.test"
from rpa_tasks.supervisor.protocol import clock
from rpa_tasks.supervisor.client import CommandResult, RunSpec, SupervisedCommand

order = RunSpec(argv=["/bin/sh", "-c", sys.argv[1]], env=json.loads(sys.argv[3]), timeout=1000, grace=0.5,
                extend_until=clock() + 8.0, log_path=sys.argv[2])
supervised = SupervisedCommand(order)
while not isinstance(event := supervised.next_event(0.1), CommandResult):
    supervised.extend(clock() + 8.0)
    print(event, flush=True)
print(event, flush=True)
"""


@contextmanager
def start_runner(task: TaskCommands, script: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A runner in a process of its own that renews a lease of eight seconds ten times a second; and its command."""
    argv = [sys.executable, "-c", RUNNER, script, str(task.log), json.dumps(task.env)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as runner:
        try:
            yield runner, int(wait_for_line(runner, "Started").split("=")[1].rstrip(")\n"))
        finally:
            runner.kill()


def wait_for_line(runner: subprocess.Popen[str], word: str) -> str:
    assert runner.stdout is not None
    for line in runner.stdout:
        if word in line:
            return line
    raise AssertionError(f"the runner ended without {word}")
