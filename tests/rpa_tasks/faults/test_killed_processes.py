"""A process is killed or stopped while commands run.

Repeatable jobs repeat under the same key, others wait for a person, and a shop never has two live runs.
"""

import signal
import time

import pytest

from config.local.processes import send_signal
from rpa_tasks.worker.runner import LEASE
from tests.rpa_tasks.faults.in_flight import QUICK, check_recovery, start_jobs


@pytest.fixture(scope="module")
def north(shared_rpa_cluster):
    with shared_rpa_cluster.node("north", slots=3, times=QUICK) as node:
        yield node


def test_killed_runner_repeats_only_idempotent_job(rpa_cluster, north, report_line):
    struck = start_jobs(rpa_cluster)
    victims = struck.runners(north)
    assert len(victims) == 2
    for victim in victims:
        victim.kill()
    struck.lease_is_over()
    check_recovery(struck, "worker_lost", report_line, "kill -9 of the worker's child")


def test_killed_supervisor_repeats_only_idempotent_job(rpa_cluster, north, report_line):
    struck = start_jobs(rpa_cluster)
    for guard in struck.guards():
        guard.kill()
    struck.cluster.wait(lambda: rpa_cluster.job(struck.once)["state"] == "unknown", "the loss of the guard is noticed")
    struck.go.touch()
    check_recovery(struck, "supervisor_lost", report_line, "kill -9 of the guard")


def test_killed_command_repeats_only_idempotent_job(rpa_cluster, north, report_line):
    struck = start_jobs(rpa_cluster)
    for command in struck.commands():
        command.kill()
    struck.cluster.wait(lambda: rpa_cluster.job(struck.once)["state"] == "unknown", "the end of the command is noticed")
    struck.go.touch()
    check_recovery(struck, "signal_9", report_line, "kill -9 of the command")


def test_resumed_worker_writes_nothing(rpa_cluster, north, report_line):
    """Its supervisors get no renewal and end the commands. Another node takes the jobs; late writes of the stopped node
    are about runs that it has lost.
    """
    struck = start_jobs(rpa_cluster)
    stopped, dropped = north.family(), north.log("stale_run_dropped")
    stopped_at = time.monotonic()
    try:
        for process in stopped:
            process.suspend()
        rpa_cluster.await_end_of_commands(*struck.tasks)
        ended_after = time.monotonic() - stopped_at
        with rpa_cluster.node("south", times=QUICK):
            struck.lease_is_over()
            check_recovery(
                struck, "worker_lost", report_line, f"SIGSTOP past the lease (commands gone after {ended_after:.1f} s)"
            )
            before = [rpa_cluster.job(task) for task in struck.tasks]
            runs = [rpa_cluster.runs(task) for task in struck.tasks]
            for process in stopped:
                send_signal(process, signal.SIGCONT)
            rpa_cluster.wait(lambda: north.log("stale_run_dropped") == dropped + 2, "the late results are dropped")
    finally:
        for process in stopped:
            send_signal(process, signal.SIGCONT)
    assert before == [rpa_cluster.job(task) for task in struck.tasks]
    assert runs == [rpa_cluster.runs(task) for task in struck.tasks]
    assert ended_after < LEASE.total_seconds()
