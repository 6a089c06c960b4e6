from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rpa_tasks.supervisor.task_commands import TaskCommands


@pytest.fixture
def task(tmp_path: Path) -> Iterator[TaskCommands]:
    task = TaskCommands(tmp_path)
    yield task
    task.clean_up()
