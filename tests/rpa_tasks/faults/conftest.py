"""One stack for most of these tests, and the lines that they leave at the end of the output."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rpa_tasks.faults.yard import Yard, yard

LINES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def folder() -> Iterator[Callable[[], Path]]:
    """Folders for state, short enough for sockets, gone at the end."""
    made: list[Path] = []

    def folder() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="rpa-")))
        made[-1].chmod(0o755)  # PostgreSQL runs as somebody else where we are root
        return made[-1]

    yield folder
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_yard(folder: Callable[[], Path]) -> Iterator[Yard]:
    with yard(folder()) as made:
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


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say a line that is shown at the end, whether the test passes or not."""
    return request.config.stash.setdefault(LINES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("RPA under faults")
        for line in lines:
            terminalreporter.write_line(line)
