"""Browser profiles that their node does not need any more: the shop is retired or gone, or at home on another node. A
profile is a login, which nobody should find years later, least of all the shop when it comes back."""

from __future__ import annotations

import os
import shutil
import time
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from django.conf import settings
from django.db.models.functions import Now

from rpa_tasks.models import ExecutionNode, Shop
from rpa_tasks.pool import places, recent, registry
from rpa_tasks.pool.browser_processes import users_of
from rpa_tasks.pool.lock import Lock
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
        """One a pass, which may be many files. When none is left, it is a while until the next look."""
        if self._looked_at is not None and time.monotonic() - self._looked_at < LOOK_EVERY:
            return False
        at = sql.now()
        if any(at - _left_at(folder, at) > KEPT_FOR and _delete(folder) for folder in _not_needed()):
            return True
        self._looked_at = time.monotonic()
        return False


def _not_needed() -> list[Path]:
    needed = _needed()
    found = []
    for folder in sorted(places.profiles().iterdir()):
        if folder.name in needed:
            (folder / LEFT).unlink(missing_ok=True)
        elif folder.is_dir() and set(os.listdir(folder)) - {places.LOCK}:
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
        recent.forget(folder.name)  # else its browser could be kept warm for ever
        return now


def _delete(folder: Path) -> bool:
    """All but its lock: of two who come later one could hold the old file and one a new one."""
    lock = Lock(folder / places.LOCK)
    if not lock.take():
        return False
    try:
        if folder.name in _needed() or _is_open(folder):  # it may have come home since the look
            return False
        for entry in list(os.scandir(folder)):
            if entry.name not in (places.LOCK, LEFT):
                shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
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
