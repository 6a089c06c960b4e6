"""What becomes of a browser profile when its shop leaves. The folders, their locks and the database are real."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.utils.timezone import now
from pytest_django import Settings

from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_processes import MARKER
from rpa_tasks.browsers.registry import IDLE, Lock, Record
from rpa_tasks.maintainer import cleaning
from rpa_tasks.maintainer.cleaning import KEPT_FOR, UNNEEDED_MARK, delete_old_profiles
from rpa_tasks.models import ExecutionNode, Lane, Platform, Shop
from rpa_tasks.supervisor.runs import MARKERS
from tests.rpa_tasks.browsers.browser_processes import sleeping

pytestmark = pytest.mark.django_db

LONG = KEPT_FOR + timedelta(hours=1)
WHOLE = {".lock", "Default", "SingletonLock"}


@pytest.fixture(autouse=True)
def node(db: None, state: Path, settings: Settings) -> None:
    settings.AFTERTOUCH_NODE = "n1"
    for name, seen_at in (("n1", now()), ("n2", now() - timedelta(days=1)), ("former", now() - LONG)):
        ExecutionNode.objects.create(name=name, seen_at=seen_at, started_at=seen_at, slots=1)


def shop(shop_id: str, home: str = "n1", **changes: Any) -> Shop:
    platform, _ = Platform.objects.get_or_create(key="pdd")
    row = Shop.objects.create(platform=platform, shop_id=shop_id, **changes)
    Lane.objects.filter(shop=row).update(home=home)
    return row


def profile(profile_id: str, *, left: timedelta | None = None) -> Path:
    """As a browser leaves one. `left`: so long ago this node has noticed that it is not needed."""
    folder = registry.profile_dir(profile_id)
    registry.profile_lock(profile_id).touch()
    (folder / "Default").mkdir()
    (folder / "Default" / "Cookies").write_text("secret")
    (folder / "SingletonLock").symlink_to("somewhere-1")
    if left is not None:
        (folder / UNNEEDED_MARK).write_text((now() - left).isoformat())
    return folder


def list_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_profile_of_retired_shop_is_deleted_after_a_month() -> None:
    shop("gone", retired_at=now())
    shop("moved", home="n2")
    folders = [profile(name) for name in ("pdd-gone", "pdd-moved", "nobodys")]
    delete_old_profiles()
    assert [list_names(folder) for folder in folders] == [WHOLE | {UNNEEDED_MARK}] * 3

    for folder in folders:
        noticed = datetime.fromisoformat((folder / UNNEEDED_MARK).read_text())
        assert abs(now() - noticed) < timedelta(hours=1)
        (folder / UNNEEDED_MARK).write_text((noticed - LONG).isoformat())
    for _ in range(2):
        delete_old_profiles()
        assert [list_names(folder) for folder in folders] == [{".lock"}] * 3


def test_old_profile_is_deleted_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another profile, which comes first, is not needed since today. The disk has no room to note that."""

    def fail(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(registry, "write_own", fail)
    recent, old = profile("pdd-a"), profile("pdd-b", left=LONG)
    delete_old_profiles()
    assert (list_names(recent), list_names(old)) == (WHOLE, {".lock"})


def test_mark_without_a_time_zone_is_written_again() -> None:
    """A browser can write the file in its profile."""
    odd, old = profile("pdd-a"), profile("pdd-b", left=LONG)
    (odd / UNNEEDED_MARK).write_text("2020-01-01T00:00:00")
    delete_old_profiles()
    assert (list_names(odd), list_names(old)) == (WHOLE | {UNNEEDED_MARK}, {".lock"})


@pytest.mark.parametrize("name", [".lock", UNNEEDED_MARK])
@pytest.mark.parametrize("is_link", [True, False])
@pytest.mark.parametrize("is_needed", [True, False])
def test_odd_file_of_one_profile_keeps_no_other(name: str, is_link: bool, is_needed: bool) -> None:
    """A browser can put a link or a directory in the place of each file in its profile."""
    if is_needed:
        shop("a")
    odd, old = profile("pdd-a", left=LONG), profile("pdd-b", left=LONG)
    (odd / name).unlink()
    if is_link:
        (odd / name).symlink_to("elsewhere")
    else:
        (odd / name).mkdir()
    delete_old_profiles()
    assert list_names(old) == {".lock"}
    assert list_names(odd) >= WHOLE - {name}


def home(profile_id: str) -> Path:
    """HOME of a shop's commands, as a flow can leave it: deep, and closed."""
    folder = registry.homes_dir() / registry.directory_name(profile_id)
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "token").write_text("secret")
    (folder / "a" / "out").symlink_to("/etc")
    (folder / "a" / "b").chmod(0)
    return folder


def test_home_of_retired_shop_is_deleted_with_its_profile() -> None:
    shop("stays")
    folders = [home(name) for name in ("pdd-gone", "pdd-no-browser", "pdd-stays")]
    profile("pdd-gone", left=LONG)
    (registry.profile_dir("pdd-no-browser") / UNNEEDED_MARK).write_text((now() - LONG).isoformat())
    delete_old_profiles()
    assert [folder.exists() for folder in folders] == [False, False, True]


def test_home_without_profile_is_kept_for_a_month() -> None:
    folder = home("pdd-gone")
    delete_old_profiles()
    assert folder.exists()
    assert (registry.profile_dir("pdd-gone") / UNNEEDED_MARK).exists()


def test_interrupted_profile_deletion_continues_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [profile(name, left=LONG) for name in ("a", "b")]
    with monkeypatch.context() as slow:
        slow.setattr(isolation, "delete_directory", lambda folder: False)
        delete_old_profiles()
    assert [list_names(folder) for folder in folders] == [WHOLE | {UNNEEDED_MARK}] * 2
    delete_old_profiles()
    assert [list_names(folder) for folder in folders] == [{".lock"}] * 2


def test_needed_profile_loses_its_unneeded_mark() -> None:
    shop("stays")
    shop("homeless", home="")  # this node may be the next to serve it
    shop("renamed", home="former")  # the disk may be this one
    shop("own", profile_id="our/own")
    folders = [profile(name, left=LONG) for name in ("pdd-stays", "pdd-homeless", "pdd-renamed", "our/own")]
    delete_old_profiles()
    assert [list_names(folder) for folder in folders] == [WHOLE] * 4


def test_profile_of_retired_platform_is_deleted() -> None:
    shop("s1")
    folder = profile("pdd-s1", left=LONG)
    Platform.objects.update(retired_at=now())
    delete_old_profiles()
    assert list_names(folder) == {".lock"}


def test_profile_in_use_is_deleted_later() -> None:
    held, idle, opened, free = (profile(name, left=LONG) for name in ("a", "b", "c", "d"))
    lock = Lock(registry.profile_lock("a"))
    assert lock.try_acquire()
    registry.write_record(Record(slot=1, state=IDLE, profile="b", pid=1))
    with sleeping(f"--user-data-dir={opened}"):  # a person's browser
        delete_old_profiles()
        assert [list_names(folder) for folder in (held, idle, opened)] == [WHOLE | {UNNEEDED_MARK}] * 3
        assert list_names(free) == {".lock"}
    lock.release()
    registry.delete_record(1)
    delete_old_profiles()
    assert [list_names(folder) for folder in (held, idle, opened)] == [{".lock"}] * 3


def test_browser_without_a_record_is_ended_before_its_profile_is_deleted() -> None:
    """Its record was deleted by hand, and its shop starts no other browser here."""
    folder = profile("pdd-gone", left=LONG)
    with sleeping(f"--user-data-dir={folder}", env={MARKER: registry.slot_marker(1)}) as browser:
        delete_old_profiles()
        assert browser.poll() is not None
    assert list_names(folder) == {".lock"}


def test_profile_is_kept_when_shop_returns_before_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have run between the look and the lock."""
    row = shop("s1", home="n2")
    folder = profile("pdd-s1", left=LONG)
    taken = Lock.try_acquire

    def take(lock: Lock) -> bool:
        Lane.objects.filter(shop=row).update(home="n1")
        return taken(lock)

    monkeypatch.setattr(cleaning.Lock, "try_acquire", take)
    delete_old_profiles()
    assert list_names(folder) >= WHOLE


def test_home_is_kept_while_a_command_of_its_shop_runs(state: Path) -> None:
    """Flows without a browser run on any node, and pin the shop to none."""
    shop("moved", home="n2")
    profile("pdd-moved", left=LONG)
    folder = home("pdd-moved")
    marks = dict(zip(MARKERS, (str(uuid4()), "1", "pdd/moved", str(state)), strict=True))
    with sleeping(env=marks):
        delete_old_profiles()
        assert (folder / "a" / "token").exists()
    delete_old_profiles()
    assert not folder.exists()


def test_run_renews_the_unneeded_mark() -> None:
    shop("moved", home="n2")
    mark = profile("pdd-moved", left=LONG) / UNNEEDED_MARK
    folder = home("pdd-moved")
    isolation.home_dir("pdd-moved")
    delete_old_profiles()
    assert (folder / "a" / "token").exists()
    assert now() - datetime.fromisoformat(mark.read_text()) < timedelta(hours=1)


def test_home_is_kept_when_a_run_starts_during_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    shop("moved", home="n2")
    profile("pdd-moved", left=LONG)
    folder = home("pdd-moved")
    look = cleaning.processes_on_profile

    def start_run(folder: str) -> Iterator[Any]:
        yield from look(folder)
        isolation.home_dir("pdd-moved")

    monkeypatch.setattr(cleaning, "processes_on_profile", start_run)
    delete_old_profiles()
    assert (folder / "a" / "token").exists()


def test_run_that_starts_during_the_deletion_keeps_its_new_home(monkeypatch: pytest.MonkeyPatch) -> None:
    shop("moved", home="n2")
    profile("pdd-moved", left=LONG)
    folder = home("pdd-moved")
    delete = isolation.delete_directory

    started = []

    def start_run(path: Path) -> bool:
        if os.path.lexists(path) and not started:
            started.append(path)
            (isolation.home_dir("pdd-moved") / "new").touch()
        return delete(path)

    monkeypatch.setattr(isolation, "delete_directory", start_run)
    delete_old_profiles()
    assert list_names(folder) == {"new"}
    assert list_names(folder.parent) == {"pdd-moved"}
    delete_old_profiles()
    assert list_names(folder) == {"new"}


def test_home_set_aside_by_an_interrupted_deletion_is_deleted() -> None:
    folder = home("pdd-gone")
    folder.rename(folder.with_name(".pdd-gone"))
    (registry.profile_dir("pdd-gone") / UNNEEDED_MARK).write_text((now() - LONG).isoformat())
    delete_old_profiles()
    assert list_names(folder.parent) == set()
