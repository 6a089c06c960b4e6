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
from rpa_tasks.supervisor.markers import LEASE_NO, SHOP, STATE_DIR, TASK_ID, end_marked_processes
from tests.rpa_tasks.guard.house import (
    DAEMON,
    FORGER,
    PATIENCE,
    SANDBOXES,
    House,
    eventually,
    guard_of,
    is_alive,
    wait_for_message,
    wait_for_start,
)

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(house: House) -> Iterator[Start]:
    """Start a process with the markers of this house, changed where the test says so."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, **markers: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(argv or ["/bin/sleep", "1000"], env=house.env | markers))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def earlier_than(lease_no: int, house: House) -> Callable[[Mapping[str, str]], bool]:
    return lambda markers: markers[TASK_ID] == house.task_id and int(markers[LEASE_NO]) < lease_no


def test_what_an_earlier_lease_left_is_ended_and_the_present_one_is_not(house: House, start: Start) -> None:
    earlier, present = start(), start(**{LEASE_NO: "8"})
    assert end_marked_processes(earlier_than(8, house)) == []
    assert earlier.wait(PATIENCE) == -signal.SIGTERM
    assert present.poll() is None


def test_what_ignores_sigterm_is_killed(house: House, start: Start) -> None:
    ready = house.folder / "ready"
    stubborn = start("/bin/sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.05; done")
    eventually(ready.exists)
    assert end_marked_processes(earlier_than(8, house)) == []
    assert stubborn.wait(PATIENCE) == -signal.SIGKILL


def test_a_daemon_is_found_wherever_it_hides(house: House, start: Start) -> None:
    place = house.folder / "daemon"
    assert start(sys.executable, "-c", DAEMON, str(place)).wait(PATIENCE) == 0
    assert is_alive(int(place.read_text()))
    assert end_marked_processes(earlier_than(8, house)) == []
    assert not is_alive(int(place.read_text()))


def test_runs_of_another_node_on_this_machine_are_left_alone(house: House, start: Start) -> None:
    another = start(**{STATE_DIR: "/somewhere/else"})
    asked: list[Mapping[str, str]] = []

    def note(markers: Mapping[str, str]) -> bool:
        asked.append(markers)
        return markers[TASK_ID] == house.task_id

    assert end_marked_processes(note) == []
    assert house.task_id not in [markers[TASK_ID] for markers in asked]
    assert another.poll() is None


def test_all_markers_are_told(house: House, start: Start) -> None:
    start(SECRET="not to be told")
    told: list[Mapping[str, str]] = []

    def note(markers: Mapping[str, str]) -> bool:
        told.append(markers)
        return False

    end_marked_processes(note)
    assert {name: house.env[name] for name in (TASK_ID, LEASE_NO, SHOP, STATE_DIR)} in told


def test_who_cannot_be_proven_dead_is_named(house: House, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    immortal = start()
    monkeypatch.setattr(processes, "PROOF_SECONDS", 0.1)
    monkeypatch.setattr("rpa_tasks.supervisor.markers.SWEEP_GRACE", 0.1)
    monkeypatch.setattr(processes.Process, "send", lambda self, number: None)
    assert end_marked_processes(earlier_than(8, house)) == [immortal.pid]


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_live_flow_that_bears_the_markers_of_another_shop_is_not_swept(house: House, sandbox: str) -> None:
    """It starts such processes all the time and would hold up each run of the other shop."""
    forged = house.env | {TASK_ID: str(uuid4()), LEASE_NO: "0", SHOP: "pdd/s2"}
    words = [f"{name}={value}" for name, value in forged.items()]
    told: list[Mapping[str, str]] = []

    def of_another_shop(markers: Mapping[str, str]) -> bool:
        told.append(markers)
        return markers[SHOP] == "pdd/s2"

    def stubborn() -> list[int]:
        found = [
            each for each in processes.all_processes() if processes.carries_marks(each, {TASK_ID: forged[TASK_ID]})
        ]
        return [each.pid for each in found if b"SIG_IGN" in Path(f"/proc/{each.pid}/cmdline").read_bytes()]

    with SupervisedCommand(house.python(FORGER, *words, prefix=house.prefix(sandbox), grace=0.5)) as guarded:
        wait_for_start(guarded)
        wait_for_message(guarded, "ready")
        before = stubborn()
        assert len(before) == 1

        assert end_marked_processes(of_another_shop) == []

        assert stubborn() == before
        assert forged[TASK_ID] not in [markers[TASK_ID] for markers in told]
        assert house.task_id in [markers[TASK_ID] for markers in told]


def test_markers_of_a_flow_whose_supervisor_process_hangs_are_those_of_its_run(house: House) -> None:
    """The flow says that it belongs to another node. Its shop's next run ends it."""
    forged = house.env | {LEASE_NO: "99", STATE_DIR: "/somewhere/else"}
    words = [f"{name}={value}" for name, value in forged.items()]
    with SupervisedCommand(house.python(FORGER, *words, grace=0.5)) as guarded:
        command = wait_for_start(guarded)
        wait_for_message(guarded, "ready")
        guard = guard_of(command)
        os.kill(guard, signal.SIGSTOP)
        try:
            assert end_marked_processes(earlier_than(8, house)) == []
            assert house.pids() == []
        finally:
            os.kill(guard, signal.SIGCONT)


def test_the_sweeper_itself_is_spared(house: House) -> None:
    script = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings.test"
from rpa_tasks.supervisor.client import end_marked_processes
print(end_marked_processes(lambda markers: markers["AFTERTOUCH_TASK_ID"] == os.environ["AFTERTOUCH_TASK_ID"]))
"""
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", script], env=house.env, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_signal_meant_for_a_dead_process_reaches_no_stranger_with_its_pid() -> None:
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
        assert stranger.wait(PATIENCE) == -signal.SIGKILL


def test_a_zombie_counts_as_gone_but_not_while_a_thread_lives_on(start: Start, house: House) -> None:
    zombie = start("/bin/true")
    eventually(lambda: not is_alive(zombie.pid))
    ready = house.folder / "ready"
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
