"""An order whose lease is over when the guard reads it: its runner was stopped before it could send it."""

from __future__ import annotations

import time

from rpa_tasks.guarded import Guarded
from rpa_tasks.verdicts import Ended, Ending, Outcome, judge
from tests.rpa_tasks.guard.house import House


def test_a_command_does_not_begin_after_its_lease(house: House) -> None:
    """Were it only told to end, it could go on for all of its grace beside the run that took its place."""
    began = house.folder / "began"
    order = house.shell(f"trap '' TERM; echo > {began}; sleep 60", extend_until=time.monotonic() - 1)
    with Guarded(order) as guarded:
        while not isinstance(ending := guarded.next_event(timeout=5), Ending):
            pass

    assert (ending.ended, ending.error, ending.started) == (Ended.NOT_STARTED, "lease_lost", False)
    assert not began.exists()
    verdict = judge(ending, exit_codes={}, idempotent=False, needs_result=False)
    assert (verdict.outcome, verdict.reason) == (Outcome.TRANSIENT, "lease_lost")  # no doubt: nothing of it ran
