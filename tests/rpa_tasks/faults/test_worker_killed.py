"""A worker is killed with all its processes; the next one of the node begins where it left off."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.rpa_tasks.faults.in_flight import QUICK, begin, check
from tests.rpa_tasks.faults.yard import Yard

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("guards_too", [False, True], ids=["worker", "worker and guards"])
def test_a_whole_worker_is_killed(the_yard: Yard, guards_too: bool, told: Callable[[str], None]) -> None:
    """With the guards nobody is left to end what the commands started, until the next worker begins."""
    with the_yard.node("south", times=QUICK) as south:
        struck = begin(the_yard)
        victims = south.family() + (struck.guards() if guards_too else [])
        commands = struck.commands()
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        for command in commands:
            the_yard.wait(lambda command=command: not command.is_running(), "the command ends")
    if not guards_too:
        the_yard.await_nobody_of(*struck.tasks)
    struck.go.touch()
    the_yard.lapse_leases(*struck.tasks)
    with the_yard.node("south", times=QUICK):
        name = "kill -9 of the worker" + (" and its guards" if guards_too else "")
        check(struck, "worker_lost", told, name)
