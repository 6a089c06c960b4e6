"""A worker is killed with all its processes; the next worker of the node continues."""

import signal

import pytest

from config.local.processes import is_alive
from tests.rpa_tasks.faults.in_flight import check_recovery, start_jobs
from tests.rpa_tasks.faults.rpa_cluster import PATIENT


@pytest.mark.parametrize("guards_too", [False, True], ids=["worker", "worker and guards"])
def test_killed_worker_repeats_only_idempotent_job(rpa_cluster, guards_too, report_line):
    """Without supervisors, started processes survive until the next worker starts."""
    with rpa_cluster.node("south", times=PATIENT) as south:
        struck = start_jobs(rpa_cluster)
        victims = south.family() + (struck.guards() if guards_too else [])
        commands = struck.commands()
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        for command in commands:
            rpa_cluster.wait(lambda command=command: not is_alive(command), "the command ends")
    if not guards_too:
        rpa_cluster.await_end_of_commands(*struck.tasks)
    struck.go.touch()
    rpa_cluster.expire_leases(*struck.tasks)
    with rpa_cluster.node("south", times=PATIENT):
        name = "kill -9 of the worker" + (" and its guards" if guards_too else "")
        check_recovery(struck, "worker_lost", report_line, name)
