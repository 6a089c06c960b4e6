"""Folders for the servers of fault tests, and lines for the end of the output."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOLD = "told"


@pytest.fixture(scope="session")
def state_folder() -> Iterator[Callable[[str], Path]]:
    """Create state folders, short enough for sockets; deleted at the end."""
    made: list[Path] = []

    def folder(name: str) -> Path:
        made.append(Path(tempfile.mkdtemp(prefix=f"{name}-")))
        made[-1].chmod(0o755)  # for root, PostgreSQL runs under another account
        return made[-1]

    yield folder
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def report_line(request) -> Callable[[str], None]:
    """Report a line at the end of the run, under the folder of its test, whether the test passes or not."""
    # A property travels with the report of its test, from whichever process that ran in.
    return lambda line: request.node.user_properties.append((TOLD, line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders: dict[str, list[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":  # the last of a test has all of its lines
                lines = [line for name, line in report.user_properties if name == TOLD]
                folders.setdefault(report.nodeid.rpartition("/")[0], []).extend(lines)
    for folder, lines in sorted(folders.items()):
        if lines:
            terminalreporter.section(folder)
            for line in lines:
                terminalreporter.write_line(line)
