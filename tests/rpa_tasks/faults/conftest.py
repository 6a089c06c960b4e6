"""One stack for most of these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rpa_tasks.faults.yard import Yard, yard


@pytest.fixture(scope="session")
def shared_yard(state_folder: Callable[[str], Path]) -> Iterator[Yard]:
    with yard(state_folder("rpa")) as made:
        yield made


@pytest.fixture
def the_yard(shared_yard: Yard) -> Iterator[Yard]:
    """The shared one; afterwards nothing waits in it for the next test's nodes."""
    yield shared_yard
    shared_yard.sql(
        "UPDATE rpa_tasks_job SET state = 'cancelled', settled_at = now(), lease_until = NULL"
        " WHERE state IN ('scheduled', 'queued', 'running')"
    )
    shared_yard.sql("UPDATE rpa_tasks_lane SET task_id = NULL WHERE task_id IS NOT NULL")
    shared_yard.wait(lambda: not shared_yard.commands_left(), "no command is left", 40)
