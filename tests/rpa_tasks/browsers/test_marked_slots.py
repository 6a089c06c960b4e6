"""Which processes the mark of a browser slot makes a browser of that slot."""

from __future__ import annotations

from pathlib import Path

from rpa_tasks.browsers import pool, registry
from rpa_tasks.browsers.browser_processes import MARKER
from rpa_tasks.browsers.registry import BUSY, Record
from rpa_tasks.supervisor.client import SupervisedCommand
from rpa_tasks.supervisor.processes import all_processes, read_environment
from tests.rpa_tasks.supervisor.task_commands import FORGER, TaskCommands, wait_for_message, wait_for_start


def bearers(mark: str) -> list[int]:
    return [each.pid for each in all_processes() if read_environment(each.pid).get(MARKER) == mark]


def test_live_flow_that_bears_the_mark_of_a_slot_is_no_browser_of_it(state: Path) -> None:
    """Its end would not be proven, and no run of any shop could use the slot."""
    commands, mark = TaskCommands(state), registry.slot_marker(2)
    order = commands.python(FORGER, f"{MARKER}={mark}", prefix=commands.prefix("bubblewrap"), grace=0.5)
    with SupervisedCommand(order) as supervised:
        wait_for_start(supervised)
        wait_for_message(supervised, "ready")
        stubborn = min(bearers(mark))

        record = Record(slot=2, state=BUSY, reason="unreadable")
        assert pool.remaining_processes(record) == []
        assert pool.end_browser(record, "test")
        assert stubborn in bearers(mark)
