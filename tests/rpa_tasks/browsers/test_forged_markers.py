"""What a flow writes on its command line and into its environment takes no browser and no profile from another shop,
and hides nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pytest_django import Settings

from rpa_tasks import isolation
from rpa_tasks.browsers import pool, registry
from rpa_tasks.browsers.browser_processes import MARKER, leftover_browsers_on, read_command_line, unowned_processes
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.browsers.registry import BUSY, Record
from rpa_tasks.supervisor.client import SupervisedCommand
from rpa_tasks.supervisor.processes import Process, all_processes, read_environment
from rpa_tasks.supervisor.runs import TASK_ID, Ancestry
from tests.rpa_tasks.browsers.browser_processes import is_gone, read_slot_states, sleeping
from tests.rpa_tasks.supervisor.task_commands import FORGER, TaskCommands, wait_for_message, wait_for_start
from tests.support.waiting import eventually

Acquire = Callable[..., AcquiredBrowser]
StartFlow = Callable[..., int]
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def start_flow(state: Path, settings: Settings) -> Iterator[StartFlow]:
    """Start a process as an isolated flow of a shop would. Returns its pid."""
    if not shutil.which("bwrap"):
        pytest.skip("missing service: bubblewrap")
    settings.AFTERTOUCH_RPA_ISOLATION = isolation.BUBBLEWRAP
    started: list[subprocess.Popen[bytes]] = []

    def start_flow(profile: str, *arguments: str, **environment: str) -> int:
        command = [sys.executable, "-c", SLEEP, *arguments]
        own = [f"{name}={value}" for name, value in environment.items()]
        # As a flow drops what it was given.
        words = [*isolation.isolate_run(profile, [], "/"), "env", "-i", *own, *command]
        given = {"PATH": os.defpath, TASK_ID: "1"}
        started.append(subprocess.Popen(words, start_new_session=True, env=given))
        return int(eventually(lambda: _running(started[-1].pid, command), "it does not start"))

    yield start_flow
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def _running(group: int, command: list[str]) -> int:
    """The pid of the command in this session, once it was entered."""
    line = " ".join(command)
    return next(
        (each.pid for each in all_processes() if each.session == group and read_command_line(each.pid) == line), 0
    )


def test_profile_name_in_other_flow_is_ignored(start_flow: StartFlow) -> None:
    profile = str(registry.profile_dir("s1").resolve())
    start_flow("s2", f"--user-data-dir={profile}")
    start_flow("s2", f"--user-data-dir={profile}", **{MARKER: registry.slot_marker(1)})

    assert (unowned_processes(profile), leftover_browsers_on(profile)) == ([], [])


def test_process_outside_sandbox_owns_profile(start_flow: StartFlow) -> None:
    profile = str(registry.profile_dir("s1").resolve())
    with sleeping(f"--user-data-dir={profile}") as person:
        assert unowned_processes(profile) == [person.pid]


def test_helper_that_ends_during_the_look_owns_no_profile(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the browser that a person closed by moments, and then shows neither words nor variables."""
    profile = str(registry.profile_dir("s1").resolve())
    has_supervisor, looks = Ancestry.has_supervisor, []
    with sleeping("--type=renderer", f"--user-data-dir={profile}") as helper:

        def end_behind(ancestry: Ancestry, process: Process) -> bool:
            found = has_supervisor(ancestry, process)
            helper.kill()
            helper.wait()
            looks.append(process.pid)
            return found

        monkeypatch.setattr(Ancestry, "has_supervisor", end_behind)
        assert unowned_processes(profile) == []
        assert looks == [helper.pid]


def test_profile_link_in_own_root_is_ignored(start_flow: StartFlow, tmp_path: Path) -> None:
    """A flow can make such a root in a namespace of its own: its links must not be followed from ours."""
    profile = registry.profile_dir("s1").resolve()
    link = tmp_path / str(profile).lstrip("/")
    link.parent.mkdir(parents=True)
    link.symlink_to(profile)
    code = "import os, sys, time; os.chroot(sys.argv[1]); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"--user-data-dir={profile}"]) as flow:
        try:
            eventually(lambda: os.readlink(f"/proc/{flow.pid}/root") == str(tmp_path), "it does not start")
            assert unowned_processes(str(profile)) == []
        finally:
            flow.kill()


def test_slot_marker_of_other_flow_does_not_block_release(acquire: Acquire, start_flow: StartFlow) -> None:
    borrowed = acquire("s1")
    flow = start_flow("s2", **{MARKER: registry.slot_marker(borrowed.slot)})

    borrowed.release(dirty=True)

    assert (read_slot_states(), is_gone(borrowed.pid), is_gone(flow)) == ({}, True, False)


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
