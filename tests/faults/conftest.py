"""The stack for most faults, and the summary line of each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fault_stack import FaultStack, Run, faults, run_fault_stack


@pytest.fixture(scope="session")
def fault_stack(state_folder: Callable[[str], Path]) -> Iterator[FaultStack]:
    with run_fault_stack(state_folder("stack")) as made:
        yield made


@pytest.fixture
def under_load(report_line: Callable[[str], None]) -> Callable[..., AbstractContextManager[Run]]:
    @contextmanager
    def under_load(where: FaultStack, name: str, **changes: Any) -> Iterator[Run]:
        run: Run | None = None
        try:
            with faults(where, name, **changes) as run:
                yield run
        finally:
            if run is not None:
                report_line(run.line())

    return under_load
