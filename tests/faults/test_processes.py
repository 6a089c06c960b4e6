"""Programs killed, stopped and ended under load: nothing accepted is lost, nothing has a second effect."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import psutil
import pytest

from tests.faults.fault_injection import FAULTS
from tests.faults.fault_stack import SETTLED_WITHIN, FaultStack, Run
from tests.faults.workers import worker

pytestmark = pytest.mark.faults

UnderLoad = Callable[..., AbstractContextManager[Run]]
HERD = 600  #: touches; six windows
CORE = "ticks,touch.high,touch.normal,touch.low"


@pytest.mark.parametrize("program", ["worker", "pool child", "ticks", "beat", "web"])
def test_killed_program_loses_nothing(fault_stack: FaultStack, under_load: UnderLoad, program: str) -> None:
    with under_load(fault_stack, f"kill -9 {program}") as run:
        run.await_random_point()
        FAULTS[f"kill -9 {program}"](run)
        run.send_load(20)


def test_killed_programs_during_herd_lose_nothing(fault_stack: FaultStack, under_load: UnderLoad) -> None:
    """Far more touches than the window are due at one moment. The dispatch and a pool child are killed in between."""
    with under_load(fault_stack, "kill -9 during a herd") as run:
        fault_stack.make_herd(run.load.prefix, HERD)
        fault_stack.wait(lambda: run.delivered("load.week") > 0, "the herd is due")
        FAULTS["kill -9 ticks"](run)
        FAULTS["kill -9 pool child"](run)
        fault_stack.wait(lambda: run.delivered("load.week") == HERD, "the herd is delivered", SETTLED_WITHIN)


def test_worker_stopped_past_lease_writes_nothing(fault_stack: FaultStack, under_load: UnderLoad) -> None:
    """Its sends are in flight as it stops. Another worker takes over what its leases let go; then it wakes up with
    answers about runs that are not its own any more."""
    target, receiver = fault_stack, fault_stack.receiver
    with (
        under_load(target, "SIGSTOP past the lease, SIGCONT") as run,
        worker(target.stack.environment, "-Q", CORE, "-c", "2", "-n", "second@%h", log="second") as second,
    ):
        second.await_ready()
        receiver.close()
        run.send_load(15)
        target.wait(lambda: receiver.held >= 10, "sends are in flight")
        stopped = target.family("core")
        run.inject_fault()
        try:
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            stopped_at = target.now()
            receiver.open()
            let_go = target.expire_leases(stopped_at)
            assert let_go
            target.wait(lambda: not _still_held(target, let_go), "the second worker takes over what was let go")
            settled = _settled(run)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        target.wait(lambda: "stale_results_dropped" in target.stack.log("core"), "late results are dropped")
        run.send_load(20)
    after = _settled(run)
    assert {task_id: after[task_id] for task_id in settled} == settled


def _still_held(target: FaultStack, let_go: Mapping[Any, int]) -> bool:
    rows = target.sql(
        "SELECT task_id, lease_no FROM scheduling_touch WHERE task_id = ANY(%s)"
        " AND (state = 'running' OR state = 'scheduled' AND reason = 'worker_lost')",
        [list(let_go)],
    )
    return any(let_go[task_id] == lease_no for task_id, lease_no in rows)


def _settled(run: Run) -> dict[object, tuple[object, ...]]:
    """What stands of the touches that have ended."""
    return {
        row["task_id"]: (row["state"], row["lease_no"], row["attempt"], row["settled_at"])
        for row in run.touches()
        if row["settled_at"]
    }


def test_worker_sigterm_settles_sends_in_flight(fault_stack: FaultStack, under_load: UnderLoad) -> None:
    target, receiver = fault_stack, fault_stack.receiver
    with under_load(target, "SIGTERM with sends in flight") as run:
        receiver.close()
        run.send_load(15)
        target.wait(lambda: receiver.held >= 10, "sends are in flight")
        main = psutil.Process(target.stack.pids["core"])
        in_flight = {call.key for each in receiver.calls_of(run.load.prefix).values() for call in each}
        run.inject_fault()
        restart = threading.Thread(target=target.stack.restart, args=["core"])
        restart.start()
        try:
            target.wait(lambda: target.stack.supervisor.states()["core"] == "STOPPING", "the worker is asked to end")
            target.wait(lambda: "warm shutdown" in target.stack.log("core").lower(), "it has begun to end")
        finally:
            receiver.open()
        restart.join(60)
        target.await_running("core", instead_of=main.pid)
        run.send_load(20)
    calls = receiver.calls_of(run.load.prefix)
    shaky = {str(row["key"]) for row in run.touches() if str(row["user"]).startswith("shaky-")}
    assert [calls[key] for key in in_flight - shaky if len(calls[key]) > 1] == []
