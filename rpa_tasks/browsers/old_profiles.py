"""Browser profiles and homes that their node does not need any more: the shop is retired or gone, or at home on another
node. They hold logins, which nobody should find years later, least of all the shop when it comes back."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models.functions import Now

from rpa_tasks import isolation
from rpa_tasks.browsers import places, recent, registry
from rpa_tasks.browsers.browser_processes import users_of
from rpa_tasks.browsers.lock import Lock
from rpa_tasks.models import ExecutionNode, Shop
from scheduling import sql

log = structlog.get_logger(__name__)

#: Who retires a shop by mistake, or moves it for a few weeks, finds its login again; hardly one lasts longer by itself.
KEPT_FOR = timedelta(days=30)
LOOK_EVERY = 600.0  #: seconds
LEFT = ".left"  #: a file in a profile: since when it is not needed, by the database's clock


class OldProfiles:
    def __init__(self) -> None:
        self._looked_at: float | None = None

    def delete_one(self) -> bool:
        """One a pass, for `isolation.DELETE_FOR` seconds at most. When none is left, it is a while until the next look.
        Returns whether the next pass goes on."""
        if self._looked_at is not None and time.monotonic() - self._looked_at < LOOK_EVERY:
            return False
        at, ends_at = sql.now(), time.monotonic() + isolation.DELETE_FOR
        for folder in _not_needed():
            if at - _left_at(folder, at) > KEPT_FOR and (_delete(folder, ends_at) or time.monotonic() >= ends_at):
                return True
        self._looked_at = time.monotonic()
        return False


def _not_needed() -> list[Path]:
    """Directories of profiles, also of one that only has a home."""
    needed = _needed()
    found = []
    for name in sorted({*os.listdir(places.profiles()), *os.listdir(places.homes())}):
        folder = places.profiles() / name
        if name in needed:
            (folder / LEFT).unlink(missing_ok=True)
            continue
        if has_home := (places.homes() / name).is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
        if has_home or (folder.is_dir() and set(os.listdir(folder)) - {places.LOCK}):
            found.append(folder)
    return found


def _needed() -> set[str]:
    """Names of folders. A shop without a home may be served by this node next; so may one whose home nobody has heard
    of for as long, which may be this very node under its former name."""
    others = ExecutionNode.objects.filter(seen_at__gt=Now() - KEPT_FOR).exclude(name=settings.AFTERTOUCH_NODE)
    shops = Shop.objects.filter(retired_at=None, platform__retired_at=None).exclude(
        lane__home__in=others.values("name")
    )
    return {places.directory_name(shop.profile) for shop in shops.select_related("platform")}


def _left_at(folder: Path, now: datetime) -> datetime:
    """Since when this node knows that it is not needed."""
    try:
        return datetime.fromisoformat(places.read_own(folder / LEFT).decode())
    except (OSError, ValueError):
        places.write_own(folder / LEFT, now.isoformat())
        recent.forget_recent(folder.name)  # else its browser could be kept warm for ever
        return now


def _delete(folder: Path, ends_at: float) -> bool:
    """With the shop's home. All but its lock: of two who come later one could hold the old file and one a new one."""
    lock = Lock(folder / places.LOCK)
    if not lock.take():
        return False
    try:
        if folder.name in _needed() or _is_open(folder):  # it may have come home since the look
            return False
        names = set(os.listdir(folder)) - {places.LOCK, LEFT}
        for path in (places.homes() / folder.name, *(folder / name for name in names)):
            if not isolation.delete_directory(path, ends_at - time.monotonic()):
                return False
        (folder / LEFT).unlink()  # the last: who is interrupted begins anew
    finally:
        lock.release()
    log.info("profile_deleted", profile=folder.name)
    return True


def _is_open(folder: Path) -> bool:
    """Some browser has it, be it an idle one or a person's."""
    records = registry.records(settings.AFTERTOUCH_RPA_BROWSERS).values()
    if any(record and record.profile and places.directory_name(record.profile) == folder.name for record in records):
        return True
    return any(True for _ in users_of(str(folder)))
