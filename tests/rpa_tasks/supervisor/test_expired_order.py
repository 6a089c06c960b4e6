"""An order whose lease is over when the guard reads it: its runner was stopped before it could send it."""

from __future__ import annotations

import os
import time

import pytest

from rpa_tasks.outcomes import CommandResult, ExitCause, RunOutcome, judge
from rpa_tasks.supervisor.client import SupervisedCommand
from rpa_tasks.supervisor.event_loop import SupervisorLoop
from rpa_tasks.supervisor.processes import NotStarted
from rpa_tasks.supervisor.protocol import Inbox, Outbox, clock, unpack_line
from tests.rpa_tasks.supervisor.task_commands import TaskCommands


def test_command_with_expired_lease_is_not_started(task: TaskCommands) -> None:
    """With SIGTERM only, it could continue for its whole grace beside the run that replaced it."""
    began = task.folder / "began"
    order = task.shell(f"trap '' TERM; echo > {began}; sleep 60", extend_until=clock() - 1)
    with SupervisedCommand(order) as supervised:
        while not isinstance(ending := supervised.next_event(timeout=5), CommandResult):
            pass

    assert (ending.ended, ending.error) == (ExitCause.NOT_STARTED, "lease_lost")
    assert not began.exists()
    verdict = judge(ending, exit_codes={}, idempotent=False, needs_result=False)
    assert (verdict.outcome, verdict.reason) == (RunOutcome.TRANSIENT, "lease_lost")  # no doubt: nothing of it ran


def test_command_after_machine_sleep_is_not_started(task: TaskCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleep counts, as it does for the lease."""
    order = unpack_line(task.order("/bin/true", extend_until=clock() + 30).line())
    awake = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: awake(which) + 100)
    told, tells = os.pipe()
    try:
        with pytest.raises(NotStarted, match="lease_lost"):
            SupervisorLoop(order, [], Inbox(told), Outbox(tells)).start()
    finally:
        os.close(told)
        os.close(tells)
