"""The maintainer beside a worker: real processes, real browsers, and a database that is down all the time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from config.environment import ROOT
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.maintainer import main
from tests.rpa_tasks.browsers.browser_processes import AcquiringProcess, is_gone, kill, read_slot_states
from tests.rpa_tasks.supervisor.task_commands import TaskCommands, start_runner, supervisor_of
from tests.support.waiting import eventually

Acquire = Callable[..., AcquiredBrowser]


class WorkerProcess:
    """See worker.py."""

    def __init__(self, state: Path, *words: str) -> None:
        self.log = state / f"worker-{len(list(state.glob('worker-*')))}.log"
        environ = {
            **os.environ,
            "AFTERTOUCH_STATE_DIR": str(state),
            "AFTERTOUCH_RPA_WARM_BROWSERS": "1",
            "DATABASE_URL": "postgres://nobody:nothing@127.0.0.1:1/nowhere",
            "PYTHONPATH": str(ROOT),
        }
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker.py")), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=environ,
                cwd=ROOT,
            )
        assert self.process.stdout
        self.maintainer, self.child = map(int, self.process.stdout.readline().split())

    def maintainer_now(self) -> int:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(b"?\n")
        self.maintainer = int(self.process.stdout.readline().split()[0])
        return self.maintainer

    @property
    def works(self) -> bool:
        return b"maintainer_started" in self.log.read_bytes()

    def stop(self) -> int:
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(180)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pid in (self.child, self.maintainer):
            if pid and not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()


@pytest.fixture
def worker(pool: Path) -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def begin(*words: str) -> WorkerProcess:
        started.append(WorkerProcess(pool, *words))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def test_maintainer_ends_browser_of_killed_holder(
    worker: Callable[..., WorkerProcess], start_acquiring_process: Callable[..., AcquiringProcess]
) -> None:
    worker()
    victim = start_acquiring_process("s1", "60")
    left = victim.read_reply()
    victim.kill()

    eventually(lambda: is_gone(left["pid"]), "the browser still lives")
    eventually(lambda: read_slot_states() == {}, "its slot is not free")


def test_killed_worker_leaves_only_browser_of_a_run(
    worker: Callable[..., WorkerProcess], start_acquiring_process: Callable[..., AcquiringProcess], acquire: Acquire
) -> None:
    """Also where a child of the worker keeps the pipe open."""
    run = start_acquiring_process("s1", "60")
    busy = run.read_reply()
    idle = acquire("s2")
    idle.release()
    killed = worker("fork")
    eventually(lambda: killed.works, "it does not start")
    killed.kill()

    eventually(lambda: is_gone(idle.pid), "the idle browser lives on")
    assert not is_gone(busy["pid"])
    assert run.request("give") == {"given": True}
    eventually(lambda: is_gone(killed.maintainer), "the maintainer lives on")
    assert is_gone(busy["pid"])
    assert read_slot_states() == {}


@pytest.mark.parametrize("killed_too", [False, True])
def test_maintainer_ends_processes_of_killed_runner(
    worker: Callable[..., WorkerProcess], pool: Path, killed_too: bool
) -> None:
    """Also where the worker itself was killed with them. The database, which is down, need not be asked."""
    task = TaskCommands(pool)
    node = worker()
    eventually(lambda: node.works, "it does not start")
    try:
        with start_runner(task, """sh -c 'touch "$HOME/there"; sleep 1000; true' & wait""") as (runner, command):
            eventually((pool / "there").exists, "it does not begin")
            os.kill(runner.pid, signal.SIGSTOP)  # it would see to it itself
            guard = supervisor_of(command)
            if killed_too:
                node.kill()
            os.kill(guard, signal.SIGKILL)
            runner.kill()
        eventually(lambda: task.pids() == [], "its children live on")
        assert is_gone(guard)
        eventually(lambda: is_gone(node.maintainer) == killed_too, "the maintainer has its own way")
    finally:
        task.clean_up()


def test_stopping_worker_waits_for_browsers(worker: Callable[..., WorkerProcess], acquire: Acquire) -> None:
    borrowed = acquire("s1")
    borrowed.release()
    stopped = worker()
    eventually(lambda: stopped.works, "it does not start")

    assert stopped.stop() == 0
    assert is_gone(stopped.maintainer)
    assert is_gone(borrowed.pid)
    assert read_slot_states() == {}


def test_second_maintainer_takes_over(worker: Callable[..., WorkerProcess]) -> None:
    one = worker()
    eventually(lambda: one.works, "it does not start")
    other = worker()
    one.kill()

    eventually(lambda: other.works, "nobody takes over")
    eventually(lambda: is_gone(one.maintainer), "the first one lives on")
    assert not is_gone(other.maintainer)


def test_killed_maintainer_is_restarted(worker: Callable[..., WorkerProcess]) -> None:
    running = worker()
    eventually(lambda: b"database_unavailable" in running.log.read_bytes(), "it says nothing")
    assert b"Traceback" not in running.log.read_bytes()
    first = running.maintainer
    kill(first)

    eventually(lambda: running.maintainer_now() != first, "no new one")
    assert not is_gone(running.maintainer)


def test_failed_maintainer_step_does_not_stop_the_next() -> None:
    taken = []

    def fails() -> None:
        raise RuntimeError("disk on fire")

    main.run_steps([fails, lambda: taken.append(1)])
    assert taken == [1]
