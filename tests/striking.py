"""What the tests under faults share: folders for their servers, and lines that stand at the end of the output."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LINES = pytest.StashKey[dict[str, list[str]]]()


@pytest.fixture(scope="session")
def state_folder() -> Iterator[Callable[[str], Path]]:
    """Folders for state, short enough for sockets, gone at the end."""
    made: list[Path] = []

    def folder(name: str) -> Path:
        made.append(Path(tempfile.mkdtemp(prefix=f"{name}-")))
        made[-1].chmod(0o755)  # PostgreSQL runs as somebody else where we are root
        return made[-1]

    yield folder
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say a line that is shown at the end, under the folder of its test, whether the test passes or not."""
    folder = str(request.path.parent.relative_to(request.config.rootpath))
    return request.config.stash.setdefault(LINES, {}).setdefault(folder, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for folder, lines in config.stash.get(LINES, {}).items():
        if lines:
            terminalreporter.section(folder)
            for line in lines:
                terminalreporter.write_line(line)
