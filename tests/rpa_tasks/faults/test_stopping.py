"""A node is told to stop while commands run: what may be repeated is sent back, the other may finish."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.rpa_tasks.faults.effects import at_once
from tests.rpa_tasks.faults.in_flight import begin
from tests.rpa_tasks.faults.yard import Yard

pytestmark = pytest.mark.faults

PATIENCE = 2.0


def test_a_worker_is_told_to_stop(the_yard: Yard, told: Callable[[str], None]) -> None:
    times = {"STOP_TIME_LIMIT": PATIENCE}
    with the_yard.node("leaving", times=times) as leaving:
        running = begin(the_yard)
        later = running.market.publish(running.market.shops[0], "once", payload={})
        leaving.program.process.terminate()
        told_at = time.monotonic()
        # A tick may have handed it over by the time that anybody looks.
        again = the_yard.await_state(running.again, "scheduled", "queued", timeout=30)
        sent_back_after = time.monotonic() - told_at
        the_yard.await_nobody_of(running.again)
        assert the_yard.job(running.once)["state"] == "running"
        assert leaving.program.is_alive()
        running.go.touch()
        assert the_yard.await_state(running.once, "succeeded", "unknown")["state"] == "succeeded"
        assert leaving.program.await_exit(30) == 0
        exited_after = time.monotonic() - told_at
    assert (again["reason"], again["failures"]) == ("node_stopping", 0)
    assert the_yard.job(later)["attempt"] == 0  # it began no more
    the_yard.await_nobody_of(*running.tasks)
    the_yard.sql("UPDATE rpa_tasks_job SET due_at = now() WHERE task_id = %s", [running.again])
    with the_yard.node("staying"):
        for task in (running.again, later):
            assert the_yard.await_state(task, "succeeded", "failed", "unknown")["state"] == "succeeded"
    first, second = running.market.log.of(running.again)
    assert (first.ended, first.key == second.key, second.lease > first.lease) == (None, True, True)
    assert not at_once(running.market.log.effects())
    assert sent_back_after >= PATIENCE
    told(
        f"SIGTERM of the worker · idempotent: sent back after {sent_back_after:.1f} s, no attempt burnt, run again "
        f"under its key; the other finished; exit 0 after {exited_after:.1f} s; no process left"
    )
