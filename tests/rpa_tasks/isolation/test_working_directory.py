"""A flow's own working directory never leads out of the isolation."""

import os
import shutil
from pathlib import Path

import pytest

from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.outcomes import CommandResult, ExitCause
from rpa_tasks.supervisor.client import RunSpec, SupervisedCommand
from rpa_tasks.worker.runner import make_run_directory

pytestmark = pytest.mark.parametrize("kind", [isolation.BUBBLEWRAP], indirect=True)


def run_in(cwd, tmp_path):
    folder = make_run_directory("p-s1", os.getpid())
    try:
        order = RunSpec(
            argv=["ls", "-d", os.curdir, "here"], env={"PATH": "/usr/bin:/bin", "HOME": str(folder)}, timeout=60,
            extend_until=float("inf"),
            log_path=str(tmp_path / "log"), cwd=str(cwd), prefix=isolation.isolate_run("p-s1", [], str(cwd)),
        )  # fmt: skip
        with SupervisedCommand(order) as supervised:
            while not isinstance(event := supervised.next_event(1), CommandResult):
                pass
        return event
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_command_starts_in_a_folder_that_it_may_read(kind, tmp_path):
    folder = Path("/usr/local/share")
    ended = run_in(folder, tmp_path)
    assert ended.ended is ExitCause.EXITED, ended
    assert "." in ended.tail.splitlines()


def test_command_does_not_start_in_a_hidden_folder(kind, tmp_path):
    """The state directory holds the data of other shops."""
    hidden = registry.browser_root().parent / f"hidden-{os.getpid()}"
    hidden.mkdir()
    (hidden / "here").touch()
    try:
        ended = run_in(hidden, tmp_path)
    finally:
        shutil.rmtree(hidden)
    assert "here" not in ended.tail.splitlines()
    assert (ended.exit, "." in ended.tail.splitlines()) == (1, False), ended
