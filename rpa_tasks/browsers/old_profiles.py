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
from rpa_tasks.browsers.browser_processes import users_of
from rpa_tasks.browsers.registry import Lock
from rpa_tasks.models import ExecutionNode, Shop
from scheduling import sql

log = structlog.get_logger(__name__)

#: A shop that was retired by mistake, or moved for weeks, finds its login again. Few logins last longer.
KEPT_FOR = timedelta(days=30)
LOOK_EVERY = 600.0  #: seconds
LEFT = ".left"  #: a file in a profile: since when it is not needed, by PostgreSQL's clock


class OldProfiles:
    def __init__(self) -> None:
        self._looked_at: float | None = None

    def delete_one(self) -> bool:
        """Delete one old profile per pass, for at most `isolation.DELETE_FOR` seconds.

        Returns whether the next pass continues. If no old profile is left, the next look follows after `LOOK_EVERY`.
        """
        if self._looked_at is not None and time.monotonic() - self._looked_at < LOOK_EVERY:
            return False
        at, ends_at = sql.now(), time.monotonic() + isolation.DELETE_FOR
        for folder in _not_needed():
            if at - _left_at(folder, at) > KEPT_FOR and (_delete(folder, ends_at) or time.monotonic() >= ends_at):
                return True
        self._looked_at = time.monotonic()
        return False


def _not_needed() -> list[Path]:
    """Return directories of profiles, including those that only have a home."""
    needed = _needed()
    found = []
    for name in sorted({*os.listdir(registry.profiles()), *os.listdir(registry.homes())}):
        folder = registry.profiles() / name
        if name in needed:
            (folder / LEFT).unlink(missing_ok=True)
            continue
        if has_home := (registry.homes() / name).is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
        if has_home or (folder.is_dir() and set(os.listdir(folder)) - {registry.LOCK}):
            found.append(folder)
    return found


def _needed() -> set[str]:
    """Return the directory names of profiles that this node may serve.

    These are profiles of shops without a preferred node, or whose node has not reported for `KEPT_FOR`. That may be
    this node under a former name.
    """
    others = ExecutionNode.objects.filter(seen_at__gt=Now() - KEPT_FOR).exclude(name=settings.AFTERTOUCH_NODE)
    shops = Shop.objects.filter(retired_at=None, platform__retired_at=None).exclude(
        lane__home__in=others.values("name")
    )
    return {registry.directory_name(shop.profile) for shop in shops.select_related("platform")}


def _left_at(folder: Path, now: datetime) -> datetime:
    """Return since when this node knows that the profile is not needed."""
    try:
        return datetime.fromisoformat(registry.read_own(folder / LEFT).decode())
    except (OSError, ValueError):
        registry.write_own(folder / LEFT, now.isoformat())
        registry.forget_recent(folder.name)  # otherwise its browser could be kept running forever
        return now


def _delete(folder: Path, ends_at: float) -> bool:
    """Delete the profile with the shop's home, except its lock file.

    Without that file two later processes could hold different locks: the old file and a new one.
    """
    lock = Lock(folder / registry.LOCK)
    if not lock.take():
        return False
    try:
        if folder.name in _needed() or _is_open(folder):  # the shop may have returned to this node since the look
            return False
        names = set(os.listdir(folder)) - {registry.LOCK, LEFT}
        for path in (registry.homes() / folder.name, *(folder / name for name in names)):
            if not isolation.delete_directory(path, ends_at - time.monotonic()):
                return False
        (folder / LEFT).unlink()  # last, so that an interrupted deletion starts again
    finally:
        lock.release()
    log.info("profile_deleted", profile=folder.name)
    return True


def _is_open(folder: Path) -> bool:
    """Return whether a browser has the profile, including an idle one or that of a person."""
    records = registry.records(settings.AFTERTOUCH_RPA_BROWSERS).values()
    if any(record and record.profile and registry.directory_name(record.profile) == folder.name for record in records):
        return True
    return any(True for _ in users_of(str(folder)))
