"""Which processes the mark of a browser slot makes a browser of that slot."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rpa_tasks.browsers import pool, registry, upkeep
from rpa_tasks.browsers.browser_processes import MARKER, marked_slots
from rpa_tasks.browsers.registry import BUSY, Record
from rpa_tasks.supervisor.client import SupervisedCommand
from rpa_tasks.supervisor.processes import all_processes, read_environment
from tests.rpa_tasks.supervisor.task_commands import FORGER, TaskCommands, wait_for_message, wait_for_start

FOLDER_AND_SLOT = "{}/slot-{}"


def bearers(mark: str) -> list[int]:
    return [each.pid for each in all_processes() if read_environment(each.pid).get(MARKER) == mark]


def test_end_unrecorded_live_flow_that_bears_the_mark_of_a_slot_is_left_alone(state: Path) -> None:
    """The maintainer would hold the lock of the slot at each pass, and no run of any shop could use the slot."""
    commands, mark = TaskCommands(state), registry.slot_marker(2)
    order = commands.python(FORGER, f"{MARKER}={mark}", prefix=commands.prefix("bubblewrap"), grace=0.5)
    with SupervisedCommand(order) as supervised:
        wait_for_start(supervised)
        wait_for_message(supervised, "ready")
        stubborn = min(bearers(mark))

        upkeep.end_unrecorded()

        assert stubborn in bearers(mark)
        assert marked_slots(str(registry.browsers_dir().resolve())) == set()
        assert pool.remaining_processes(Record(slot=2, state=BUSY, reason="unreadable")) == []
        assert not registry.slot_lock(2).exists()


def test_end_unrecorded_process_with_a_lost_record_is_ended(state: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "1000"], env={MARKER: registry.slot_marker(2)}) as browser:
        try:
            upkeep.end_unrecorded()
            assert browser.wait(30) == -15
        finally:
            browser.kill()


@pytest.mark.parametrize("number", ["02", "9" * 5000], ids=len)
def test_end_unrecorded_mark_of_no_slot_makes_no_file_and_prevents_no_other(state: Path, number: str) -> None:
    mark = FOLDER_AND_SLOT.format(registry.browsers_dir().resolve(), number)
    with (
        subprocess.Popen(["/bin/sleep", "1000"], env={MARKER: mark}) as stranger,
        subprocess.Popen(["/bin/sleep", "1000"], env={MARKER: registry.slot_marker(2)}) as browser,
    ):
        try:
            upkeep.end_unrecorded()
            assert browser.wait(30) == -15
            assert stranger.poll() is None
            assert [path.name for path in registry.browsers_dir().iterdir()] == ["slot-2.lock"]
        finally:
            stranger.kill()
            browser.kill()
