"""Delete browser profiles and homes that their node no longer needs.

The shop is retired, deleted or pinned to another node. Reads the database; the pool itself does not.
"""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models.functions import Now

from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_processes import processes_on_profile
from rpa_tasks.browsers.registry import Lock
from rpa_tasks.models import ExecutionNode, Shop
from scheduling import sql

log = structlog.get_logger(__name__)

#: A shop that was retired by mistake, or moved for weeks, finds its login again. Few logins last longer.
KEPT_FOR = timedelta(days=30)
SCAN_INTERVAL = 600.0  #: seconds
UNNEEDED_MARK = ".left"  #: a file in a profile: since when it is not needed, by PostgreSQL's clock


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
            if at - _unneeded_since(folder, at) > KEPT_FOR and (
                _delete_profile(folder, ends_at) or time.monotonic() >= ends_at
            ):
                return True
        self._looked_at = time.monotonic()
        return False


def _unneeded_profiles() -> list[Path]:
    """Return directories of profiles, including those that only have a home."""
    needed = _needed_profiles()
    found = []
    for name in sorted({*os.listdir(registry.profiles_dir()), *os.listdir(registry.homes_dir())}):
        folder = registry.profiles_dir() / name
        if name in needed:
            (folder / UNNEEDED_MARK).unlink(missing_ok=True)
            continue
        if has_home := (registry.homes_dir() / name).is_dir():
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


def _unneeded_since(folder: Path, now: datetime) -> datetime:
    """Return since when this node knows that the profile is not needed."""
    try:
        return datetime.fromisoformat(registry.read_own(folder / UNNEEDED_MARK).decode())
    except (OSError, ValueError):
        registry.write_own(folder / UNNEEDED_MARK, now.isoformat())
        registry.delete_recent_uses(folder.name)  # otherwise its browser could be kept running forever
        return now


def _delete_profile(folder: Path, ends_at: float) -> bool:
    """Delete the profile with the shop's home, except its lock file.

    Without that file two later processes could hold different locks: the old file and a new one.
    """
    lock = Lock(folder / registry.LOCK)
    if not lock.try_acquire():
        return False
    try:
        if folder.name in _needed_profiles() or _is_in_use(
            folder
        ):  # the shop may have returned to this node since the look
            return False
        names = set(os.listdir(folder)) - {registry.LOCK, UNNEEDED_MARK}
        for path in (registry.homes_dir() / folder.name, *(folder / name for name in names)):
            if not isolation.delete_directory(path, ends_at - time.monotonic()):
                return False
        (folder / UNNEEDED_MARK).unlink()  # last, so that an interrupted deletion starts again
    finally:
        lock.release()
    log.info("profile_deleted", profile=folder.name)
    return True


def _is_in_use(folder: Path) -> bool:
    """Return whether a browser has the profile, including an idle one or that of a person."""
    records = registry.read_records(settings.AFTERTOUCH_RPA_BROWSERS).values()
    if any(record and record.profile and registry.directory_name(record.profile) == folder.name for record in records):
        return True
    return any(True for _ in processes_on_profile(str(folder)))
