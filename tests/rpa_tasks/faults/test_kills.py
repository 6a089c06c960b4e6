"""Somebody is killed or stopped while commands run. What may be repeated is, under the same key; what may not waits
for a person; and never are two of a shop alive at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from config.local.processes import send_signal
from tests.rpa_tasks.faults.in_flight import QUICK, begin, check
from tests.rpa_tasks.faults.yard import Node, Yard

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def north(shared_yard: Yard) -> Iterator[Node]:
    with shared_yard.node("north", slots=3, times=QUICK) as node:
        yield node


def test_the_process_that_runs_a_job_is_killed(the_yard: Yard, north: Node, told: Callable[[str], None]) -> None:
    struck = begin(the_yard)
    victims = struck.runners(north)
    assert len(victims) == 2
    for victim in victims:
        victim.kill()
    struck.lease_is_over()
    check(struck, "worker_lost", told, "kill -9 of the worker's child")


def test_the_guard_is_killed(the_yard: Yard, north: Node, told: Callable[[str], None]) -> None:
    struck = begin(the_yard)
    for guard in struck.guards():
        guard.kill()
    struck.yard.wait(lambda: the_yard.job(struck.once)["state"] == "unknown", "the loss of the guard is noticed")
    struck.go.touch()
    check(struck, "guard_lost", told, "kill -9 of the guard")


def test_the_command_is_killed(the_yard: Yard, north: Node, told: Callable[[str], None]) -> None:
    struck = begin(the_yard)
    for command in struck.commands():
        command.kill()
    struck.yard.wait(lambda: the_yard.job(struck.once)["state"] == "unknown", "the end of the command is noticed")
    struck.go.touch()
    check(struck, "signal_9", told, "kill -9 of the command")


def test_a_stopped_worker_wakes_up_after_its_lease(the_yard: Yard, north: Node, told: Callable[[str], None]) -> None:
    """Its guards hear nothing and end the commands. Another node takes over, and what the stopped one says when it
    wakes up is about runs that are not its own any more."""
    struck = begin(the_yard)
    stopped = north.family()
    stopped_at = time.monotonic()
    try:
        for process in stopped:
            process.suspend()
        the_yard.await_nobody_of(*struck.tasks)
        ended_after = time.monotonic() - stopped_at
        with the_yard.node("south", times=QUICK):
            struck.lease_is_over()
            check(struck, "worker_lost", told, f"SIGSTOP past the lease (commands gone after {ended_after:.1f} s)")
            before = [the_yard.job(task) for task in struck.tasks]
            runs = [the_yard.runs(task) for task in struck.tasks]
            for process in stopped:
                send_signal(process, signal.SIGCONT)
            the_yard.wait(lambda: north.log("stale_run_dropped") == 2, "the late results are dropped")
    finally:
        for process in stopped:
            send_signal(process, signal.SIGCONT)
    assert before == [the_yard.job(task) for task in struck.tasks]
    assert runs == [the_yard.runs(task) for task in struck.tasks]
    assert ended_after < QUICK["EXTENSION"] + 15
