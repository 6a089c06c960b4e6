"""A descendant of a command in a session of its own, without our environment, does not survive a killed guard."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from config.local.processes import wait_until
from rpa_tasks import isolation
from rpa_tasks.outcomes import CommandResult, ExitCause
from rpa_tasks.supervisor.client import RunSpec, Started, SupervisedCommand
from rpa_tasks.supervisor.processes import all_processes, read_process
from rpa_tasks.worker.runner import make_run_directory
from tests.support.waiting import WAIT_LIMIT

#: Leaves its parent, its session and its environment. Its argument identifies it.
HIDES = """
import os, subprocess, sys, time
if not os.fork():
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], {})
time.sleep(600)
"""


def find_hidden_processes(word):
    def line(process):
        try:
            return Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return []

    return [
        each for each in all_processes() if line(each)[1:4] == [b"-c", b"import time; time.sleep(600)", word.encode()]
    ]


def test_killed_supervisor_leaves_no_hidden_descendant(kind, tmp_path):
    word = f"hidden-{os.getpid()}-{kind}-{time.monotonic_ns()}"
    folder = make_run_directory("p-s1", os.getpid())
    order = RunSpec(
        argv=[sys.executable, "-c", HIDES, word], env={"PATH": "/usr/bin:/bin", "HOME": str(folder)}, timeout=600,
        extend_until=float("inf"),
        log_path=str(tmp_path / "log"), cwd=str(folder),
        prefix=isolation.isolate_run("p-s1", [], str(folder)),
    )  # fmt: skip
    with SupervisedCommand(order) as supervised:
        while not isinstance(event := supervised.next_event(1), Started):
            assert not isinstance(event, CommandResult), event
        assert wait_until(lambda: find_hidden_processes(word), WAIT_LIMIT)
        command = read_process(event.pid)
        assert command
        os.kill(command.parent, signal.SIGKILL)
        while not isinstance(event := supervised.next_event(1), CommandResult):
            pass
    left = find_hidden_processes(word)
    for process in left:
        process.send(signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    assert (event.ended, event.survivors, left) == (ExitCause.SUPERVISOR_LOST, 0, [])
