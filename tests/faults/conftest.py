"""The stack that most faults strike, and the lines that the runs leave at the end of the output."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.house import House, Run, faults, house

LINES = pytest.StashKey[list[str]]()
STATE = Path(tempfile.gettempdir()) / "faults"


@pytest.fixture(scope="session")
def state_folder() -> Iterator[Callable[[str], Path]]:
    """Folders for state, short enough for sockets, gone at the end."""
    STATE.mkdir(mode=0o755, exist_ok=True)
    made: list[Path] = []

    def folder(name: str) -> Path:
        made.append(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=STATE)))
        return made[-1]

    yield folder
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def the_house(state_folder: Callable[[str], Path]) -> Iterator[House]:
    with house(state_folder("house")) as made:
        yield made


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say a line that is shown at the end, whether the test passes or not."""
    lines = request.config.stash.setdefault(LINES, [])
    return lines.append


@pytest.fixture
def under_load(told: Callable[[str], None]) -> Callable[..., AbstractContextManager[Run]]:
    @contextmanager
    def under_load(where: House, name: str, **changes: Any) -> Iterator[Run]:
        run: Run | None = None
        try:
            with faults(where, name, **changes) as run:
                yield run
        finally:
            if run is not None:
                told(run.line())

    return under_load


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("faults")
        for line in lines:
            terminalreporter.write_line(line)
