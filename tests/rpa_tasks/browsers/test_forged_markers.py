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

from rpa_tasks import isolation, shop_uids
from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_processes import MARKER, leftover_browsers_on, read_command_line, unowned_processes
from rpa_tasks.browsers.pool import AcquiredBrowser
from rpa_tasks.browsers.registry import BUSY, Record
from rpa_tasks.supervisor import confine
from rpa_tasks.supervisor.markers import LEASE_NO, SHOP, STATE_DIR, TASK_ID, end_marked_processes, state_dir
from rpa_tasks.supervisor.processes import all_processes, real_uid
from tests.rpa_tasks.browsers.browser_processes import eventually, is_gone, read_slot_states

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give commands a uid of their own")
Acquire = Callable[..., AcquiredBrowser]
StartFlow = Callable[..., int]
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def start_flow(state: Path, settings: Settings) -> Iterator[StartFlow]:
    """Start a process as a flow of a shop would, isolated in either way. Returns its pid."""
    settings.AFTERTOUCH_RPA_ISOLATION = isolation.UID
    started: list[subprocess.Popen[bytes]] = []

    def start_flow(kind: str, profile: str, *arguments: str, **environment: str) -> int:
        if kind == isolation.BUBBLEWRAP and not shutil.which("bwrap"):
            pytest.skip("missing service: bubblewrap")
        owner = shop_uids.uid_of(profile) if kind == isolation.UID else 0
        binds = {str(isolation.home_dir(profile)): confine.WRITE, str(registry.profile_dir(profile)): confine.READ}
        plan = isolation._build_plan(kind, owner, binds, ruleset=-1)
        command = [sys.executable, "-c", SLEEP, *arguments]
        own = [f"{name}={value}" for name, value in environment.items()]
        words = [*isolation._start_command(plan), "env", "-i", *own, *command]  # as a flow drops what it was given
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


@pytest.mark.parametrize("kind", [isolation.UID, isolation.BUBBLEWRAP])
def test_profile_name_in_other_flow_is_ignored(start_flow: StartFlow, kind: str) -> None:
    profile = str(registry.profile_dir("s1").resolve())
    start_flow(kind, "s2", f"--user-data-dir={profile}")
    start_flow(kind, "s2", f"--user-data-dir={profile}", **{MARKER: registry.slot_marker(1)})

    assert (unowned_processes(profile), leftover_browsers_on(profile)) == ([], [])


def test_process_outside_sandbox_owns_profile(start_flow: StartFlow) -> None:
    profile = str(registry.profile_dir("s1").resolve())
    with subprocess.Popen([sys.executable, "-c", SLEEP, f"--user-data-dir={profile}"]) as person:
        try:
            assert eventually(lambda: unowned_processes(profile), "it does not start") == [person.pid]
        finally:
            person.kill()


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


@pytest.mark.browser
@pytest.mark.parametrize("kind", [isolation.UID, isolation.BUBBLEWRAP])
def test_slot_marker_of_other_flow_does_not_block_release(start_flow: StartFlow, acquire: Acquire, kind: str) -> None:
    borrowed = acquire("s1")
    flow = start_flow(kind, "s2", **{MARKER: registry.slot_marker(borrowed.slot)})

    borrowed.release(dirty=True)

    assert (read_slot_states(), is_gone(borrowed.pid), is_gone(flow)) == ({}, True, False)


@pytest.mark.parametrize("slot", [0, 1, 2], ids=("unknown", "starting", "recorded"))
def test_leftover_process_with_browser_marker_is_found(start_flow: StartFlow, slot: int) -> None:
    registry.write_record(Record(slot=1, state=BUSY, profile="s2"))  # another shop's, and only about to start
    registry.write_record(Record(slot=2, state=BUSY, profile="s1", pid=os.getpid(), ticks=1))
    flow = start_flow(isolation.UID, "s1", **{MARKER: registry.slot_marker(slot)})

    assert [each.pid for each in shop_uids.leftover_run_processes({shop_uids.uid_of("s1")})] == [flow]


@pytest.mark.browser
def test_leftover_search_keeps_pool_browser(start_flow: StartFlow, acquire: Acquire) -> None:
    borrowed = acquire("s1")
    uid = shop_uids.uid_of("s1")
    flow = start_flow(isolation.UID, "s1", **{MARKER: registry.slot_marker(borrowed.slot)})
    assert real_uid(borrowed.pid) == uid

    assert [each.pid for each in shop_uids.leftover_run_processes({uid})] == [flow]
    record = registry.read_record(borrowed.slot)
    assert record
    registry.write_record(Record(slot=borrowed.slot, state=BUSY, profile="s1"))  # as while it is started
    starting = shop_uids.leftover_run_processes({uid})
    registry.write_record(record)
    assert borrowed.pid not in [each.pid for each in starting]


def test_sweep_keeps_process_of_other_shop_with_same_markers(start_flow: StartFlow) -> None:
    """A flow that starts such processes all the time would otherwise hold up the other shop's runs."""
    marks = {TASK_ID: "1", LEASE_NO: "0", SHOP: "p/s1", STATE_DIR: state_dir()}
    forged = start_flow(isolation.UID, "s2", **marks)
    own = start_flow(isolation.UID, "s1", **marks)

    def sweep() -> bool:
        left = end_marked_processes(lambda found: found[SHOP] == "p/s1", spares=shop_uids.uids_of_others("s1"))
        return left == [] and is_gone(own)

    eventually(sweep, "the shop's own process does not end")
    assert not is_gone(forged)
