"""Delete browser profiles and homes that their node no longer needs.

The shop is retired, deleted or pinned to another node, and for `KEPT_FOR` no run used its home here. Reads the
database; the pool itself does not.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models.functions import Now

from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_processes import processes_on_profile
from rpa_tasks.browsers.registry import UNNEEDED_MARK, Lock
from rpa_tasks.models import ExecutionNode, Shop
from rpa_tasks.supervisor.runs import SHOP, list_run_processes
from scheduling import sql

log = structlog.get_logger(__name__)

#: A shop that was retired by mistake, or moved for weeks, finds its login again. Few logins last longer.
KEPT_FOR = timedelta(days=30)
SCAN_INTERVAL = 600.0  #: seconds


class OldProfiles:
    def __init__(self) -> None:
        self._looked_at: float | None = None

    def delete_one(self) -> bool:
        """Delete one old profile per pass, for at most `isolation.DELETE_FOR` seconds.

        Returns whether the next pass continues. If no old profile is left, the next look follows after `SCAN_INTERVAL`.
        """
        if self._looked_at is not None and time.monotonic() - self._looked_at < SCAN_INTERVAL:
            return False
        at, ends_at = sql.now(), time.monotonic() + isolation.DELETE_FOR
        for folder in _unneeded_profiles():
            if _is_old(folder, at) and (_delete_profile(folder, at, ends_at) or time.monotonic() >= ends_at):
                return True
        self._looked_at = time.monotonic()
        return False


def _unneeded_profiles() -> list[Path]:
    """Return directories of profiles, including those that only have a home."""
    needed = _needed_profiles()
    found = []
    homes = {name.removeprefix(".") for name in os.listdir(registry.homes_dir())}
    for name in sorted({*os.listdir(registry.profiles_dir()), *homes}):
        folder = registry.profiles_dir() / name
        if name in needed:
            (folder / UNNEEDED_MARK).unlink(missing_ok=True)
            continue
        if has_home := any(path.is_dir() for path in _home_paths(name)):
            with suppress(OSError):
                folder.mkdir(mode=0o700, exist_ok=True)
        if has_home or (folder.is_dir() and set(os.listdir(folder)) - {registry.LOCK}):
            found.append(folder)
    return found


def _needed_profiles() -> set[str]:
    """Return the directory names of profiles that this node may serve.

    These are profiles of shops without a preferred node, or whose node has not reported for `KEPT_FOR`. That may be
    this node under a former name.
    """
    others = ExecutionNode.objects.filter(seen_at__gt=Now() - KEPT_FOR).exclude(name=settings.AFTERTOUCH_NODE)
    shops = Shop.objects.filter(retired_at=None, platform__retired_at=None).exclude(
        lane__home__in=others.values("name")
    )
    return {registry.directory_name(shop.profile) for shop in shops.select_related("platform")}


def _home_paths(name: str) -> tuple[Path, Path]:
    """Return the home of a profile's directory name, and where its deletion sets it aside. No name has a dot first."""
    return registry.homes_dir() / name, registry.homes_dir() / f".{name}"


def _is_old(folder: Path, at: datetime) -> bool:
    return at - _unneeded_since(folder, at) > KEPT_FOR


def _unneeded_since(folder: Path, now: datetime) -> datetime:
    """Return since when this node knows that the profile is not needed."""
    try:
        return datetime.fromisoformat(registry.read_own(folder / UNNEEDED_MARK).decode())
    except (OSError, ValueError):
        with suppress(OSError):  # on a full disk, where the deletion of other profiles must go on
            registry.write_own(folder / UNNEEDED_MARK, now.isoformat())
        return now


def _delete_profile(folder: Path, at: datetime, ends_at: float) -> bool:
    """Delete the profile with the shop's home, except its lock file.

    Without that file two later processes could hold different locks: the old file and a new one.
    """
    lock = Lock(folder / registry.LOCK)
    if not lock.try_acquire():
        return False
    try:
        # The shop may have returned to this node since the look.
        if folder.name in _needed_profiles() or _is_in_use(folder):
            return False
        home, aside = _home_paths(folder.name)
        if not isolation.delete_directory(aside, ends_at - time.monotonic()):
            return False  # the rest of an interrupted deletion
        with registry.homes_lock():
            if not _is_old(folder, at):  # a run has taken the home since
                return False
            with suppress(FileNotFoundError):
                home.rename(aside)  # a run that starts from now on gets a new one
        names = set(os.listdir(folder)) - {registry.LOCK, UNNEEDED_MARK}
        for path in (aside, *(folder / name for name in names)):
            if not isolation.delete_directory(path, ends_at - time.monotonic()):
                return False
        with suppress(OSError):  # not empty: a run begins
            registry.shop_runs_path(folder.name).rmdir()
        # Last, so that an interrupted deletion starts again. A run may have removed it.
        (folder / UNNEEDED_MARK).unlink(missing_ok=True)
    finally:
        lock.release()
    log.info("profile_deleted", profile=folder.name)
    return True


def _is_in_use(folder: Path) -> bool:
    """Return whether a browser has the profile, including an idle one or that of a person, or a command its home."""
    records = registry.read_records().values()
    if any(record and record.profile and registry.directory_name(record.profile) == folder.name for record in records):
        return True
    return any(True for _ in processes_on_profile(str(folder))) or folder.name in _running_profiles()


def _running_profiles() -> set[str]:
    """Return the directory names of profiles of shops with processes of a run on this node, retired shops included."""
    names = {each.markers[SHOP] for each in list_run_processes()}
    shops = Shop.objects.select_related("platform").filter(shop_id__in=[name.partition("/")[2] for name in names])
    return {registry.directory_name(shop.profile) for shop in shops if f"{shop.platform.key}/{shop.shop_id}" in names}
