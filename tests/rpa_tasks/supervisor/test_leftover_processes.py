"""Finding and ending what an earlier lease left on this node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from uuid import uuid4

import pytest

from rpa_tasks.supervisor import processes
from rpa_tasks.supervisor.client import SupervisedCommand
from rpa_tasks.supervisor.runs import LEASE_NO, SHOP, STATE_DIR, TASK_ID, end_marked_processes
from tests.rpa_tasks.supervisor.task_commands import (
    DAEMON,
    FORGER,
    SANDBOXES,
    TaskCommands,
    is_alive,
    supervisor_of,
    wait_for_message,
    wait_for_start,
)
from tests.support.waiting import WAIT_LIMIT, eventually

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(task: TaskCommands) -> Iterator[Start]:
    """Start a process with the markers of this deployment and these changes."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, **markers: str) -> subprocess.Popen[bytes]:
        environment = task.env | markers
        started.append(subprocess.Popen(argv or ["/bin/sleep", "1000"], env=environment))
        # Linux closes the pipe that `Popen` waits for before it sets the environment of the new program.
        expected = {name: environment[name] for name in (TASK_ID, LEASE_NO, STATE_DIR)}
        process = started[-1]
        eventually(
            lambda: (
                process.poll() is not None
                or expected.items() <= processes.read_environment(process.pid, having=TASK_ID).items()
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def has_earlier_lease(lease_no: int, task: TaskCommands) -> Callable[[Mapping[str, str]], bool]:
    return lambda markers: markers[TASK_ID] == task.task_id and int(markers[LEASE_NO]) < lease_no


def test_sweep_ends_exactly_the_processes_of_earlier_leases_on_this_node(task: TaskCommands, start: Start) -> None:
    ready, place = task.folder / "ready", task.folder / "daemon"
    earlier, present = start(), start(**{LEASE_NO: "8"})
    another = start(**{STATE_DIR: "/somewhere/else"})
    stubborn = start("/bin/sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.05; done")
    assert start(sys.executable, "-c", DAEMON, str(place)).wait(WAIT_LIMIT) == 0
    eventually(ready.exists)
    told: list[Mapping[str, str]] = []

    def is_earlier(markers: Mapping[str, str]) -> bool:
        told.append(markers)
        return has_earlier_lease(8, task)(markers)

    assert end_marked_processes(is_earlier) == []
    assert earlier.wait(WAIT_LIMIT) == -signal.SIGTERM
    assert stubborn.wait(WAIT_LIMIT) == -signal.SIGKILL
    assert not is_alive(int(place.read_text()))
    assert (present.poll(), another.poll()) == (None, None)
    assert {name: task.env[name] for name in (TASK_ID, LEASE_NO, SHOP, STATE_DIR)} in told
    assert {markers[STATE_DIR] for markers in told} == {task.env[STATE_DIR]}


def test_sweep_returns_processes_that_did_not_end(
    task: TaskCommands, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    immortal = start()
    monkeypatch.setattr(processes, "PROOF_SECONDS", 0.1)
    monkeypatch.setattr("rpa_tasks.supervisor.runs.SWEEP_GRACE", 0.1)
    monkeypatch.setattr(processes.Process, "send", lambda self, number: None)
    assert end_marked_processes(has_earlier_lease(8, task)) == [immortal.pid]


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_live_flow_that_bears_the_markers_of_another_shop_is_not_swept(task: TaskCommands, sandbox: str) -> None:
    """It starts such processes all the time and would hold up each run of the other shop."""
    forged = task.env | {TASK_ID: str(uuid4()), LEASE_NO: "0", SHOP: "pdd/s2"}
    words = [f"{name}={value}" for name, value in forged.items()]
    told: list[Mapping[str, str]] = []

    def of_another_shop(markers: Mapping[str, str]) -> bool:
        told.append(markers)
        return markers[SHOP] == "pdd/s2"

    def stubborn() -> list[int]:
        return [
            each.pid
            for each in processes.all_processes()
            if processes.read_environment(each.pid).get(TASK_ID) == forged[TASK_ID]
            and b"SIG_IGN" in processes.read_file(f"/proc/{each.pid}/cmdline")  # a short one may have ended
        ]

    with SupervisedCommand(task.python(FORGER, *words, prefix=task.prefix(sandbox), grace=0.5)) as supervised:
        wait_for_start(supervised)
        wait_for_message(supervised, "ready")
        before = stubborn()
        assert len(before) == 1

        assert end_marked_processes(of_another_shop) == []

        assert stubborn() == before
        assert forged[TASK_ID] not in [markers[TASK_ID] for markers in told]
        assert task.task_id in [markers[TASK_ID] for markers in told]


def test_markers_of_a_flow_whose_supervisor_process_hangs_are_those_of_its_run(task: TaskCommands) -> None:
    """The flow claims to belong to another node. The shop's next run ends it."""
    forged = task.env | {LEASE_NO: "99", STATE_DIR: "/somewhere/else"}
    words = [f"{name}={value}" for name, value in forged.items()]
    with SupervisedCommand(task.python(FORGER, *words, grace=0.5)) as supervised:
        command = wait_for_start(supervised)
        wait_for_message(supervised, "ready")
        guard = supervisor_of(command)
        os.kill(guard, signal.SIGSTOP)
        try:
            assert end_marked_processes(has_earlier_lease(8, task)) == []
            assert task.pids() == []
        finally:
            os.kill(guard, signal.SIGCONT)


def test_sweep_does_not_end_itself(task: TaskCommands) -> None:
    script = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings.test"
from rpa_tasks.supervisor.runs import end_marked_processes
print(end_marked_processes(lambda markers: markers["AFTERTOUCH_TASK_ID"] == os.environ["AFTERTOUCH_TASK_ID"]))
"""
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", script], env=task.env, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_signal_is_not_sent_to_process_with_reused_pid() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as stranger:
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        process = processes.read_process(stranger.pid)
        assert process is not None
        process.started -= 1  # as if it were the one that had the pid before
        process.send(signal.SIGKILL)
        stranger.stdin.write(b"still here\n")
        assert stranger.stdout.readline() == b"still here\n"
        process.started += 1
        process.send(signal.SIGKILL)
        assert stranger.wait(WAIT_LIMIT) == -signal.SIGKILL


def test_zombie_counts_as_gone_only_without_threads(start: Start, task: TaskCommands) -> None:
    zombie = start("/bin/true")
    eventually(lambda: not is_alive(zombie.pid))
    ready = task.folder / "ready"
    script = f"""
import ctypes, pathlib, threading, time
threading.Thread(target=lambda: (pathlib.Path({str(ready)!r}).touch(), time.sleep(1000))).start()
ctypes.CDLL(None).syscall(60, 0)  # ends this thread alone
"""
    headless = start(sys.executable, "-c", script)
    eventually(ready.exists)
    eventually(lambda: b") Z" in Path(f"/proc/{headless.pid}/stat").read_bytes())
    assert is_alive(headless.pid)
    os.kill(headless.pid, signal.SIGKILL)
    eventually(lambda: not is_alive(headless.pid))
