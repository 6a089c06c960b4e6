"""A node stops while commands run: repeatable jobs are returned, others may finish."""

import time

from tests.rpa_tasks.faults.effect_log import find_overlaps
from tests.rpa_tasks.faults.in_flight import start_jobs

STOP_LIMIT = 2.0


def test_stopped_worker_returns_idempotent_job_and_ends_other(rpa_cluster, report_line):
    times = {"STOP_TIME_LIMIT": STOP_LIMIT}
    with rpa_cluster.node("leaving", times=times) as leaving:
        running = start_jobs(rpa_cluster)
        later = running.market.publish(running.market.shops[0], "once", payload={})
        stopped_at = time.monotonic()
        leaving.program.process.terminate()
        # A tick may have dispatched it before this reads it.
        again = rpa_cluster.await_state(running.again, "scheduled", "queued")
        sent_back_after = time.monotonic() - stopped_at
        rpa_cluster.await_end_of_commands(running.again)
        assert rpa_cluster.job(running.once)["state"] == "running"
        assert leaving.program.is_alive()
        running.go.touch()
        assert rpa_cluster.await_state(running.once, "succeeded", "unknown")["state"] == "succeeded"
        assert leaving.program.await_exit() == 0
        exited_after = time.monotonic() - stopped_at
    assert (again["reason"], again["failures"]) == ("node_stopping", 0)
    assert rpa_cluster.job(later)["attempt"] == 0  # it started no more
    rpa_cluster.await_end_of_commands(*running.tasks)
    rpa_cluster.sql("UPDATE rpa_tasks_job SET due_at = now() WHERE task_id = %s", [running.again])
    with rpa_cluster.node("staying"):
        for task in (running.again, later):
            assert rpa_cluster.await_state(task, "succeeded", "failed", "unknown")["state"] == "succeeded"
    first, second = running.market.log.of(running.again)
    assert (first.ended, first.key == second.key, second.lease > first.lease) == (None, True, True)
    assert not find_overlaps(running.market.log.effects())
    assert sent_back_after >= STOP_LIMIT
    report_line(
        f"SIGTERM of the worker · idempotent: sent back after {sent_back_after:.1f} s, no attempt burnt, run again "
        f"under its key; the other finished; exit 0 after {exited_after:.1f} s; no process left"
    )
