"""The cookies that Chromium forgets when it ends: many shops keep a login in one that is meant for "this session".

A browser is ended whenever its slot is needed by another shop, or it has grown old. To the shop's platform that must
not look like a person who logs out; so these cookies are kept beside the profile and given to its next browser.
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import structlog
from django.conf import settings
from django.db.models.functions import Now

from rpa_tasks import isolation
from rpa_tasks.browsers import devtools, registry
from rpa_tasks.browsers.browser_processes import users_of
from rpa_tasks.browsers.registry import Lock
from rpa_tasks.models import ExecutionNode, Shop
from scheduling import sql

log = structlog.get_logger(__name__)


NAME = ".session-cookies.json"
ANSWER_WITHIN = 2.0  #: seconds for a browser to say what it has
KEPT = ("name", "value", "domain", "path", "secure", "httpOnly", "sameSite", "priority", "sourceScheme", "partitionKey")


def keep(port: int, path: str, profile: Path) -> None:
    """Before the browser is asked to close. devtools.NoAnswer."""
    cookies = devtools.call(port, path, "Storage.getCookies", timeout=ANSWER_WITHIN)["cookies"]
    lasting = [{key: cookie[key] for key in KEPT if key in cookie} for cookie in cookies if cookie["session"]]
    try:
        _write(profile / NAME, lasting)
    except OSError as error:
        log.warning("session_cookies_not_kept", profile=profile.name, error=str(error))


def bring_back(port: int, path: str, profile: Path) -> None:
    """To the profile's fresh browser. One that it has already is newer."""
    try:
        kept = json.loads(registry.read_own(profile / NAME))
    except (OSError, ValueError):
        return
    try:
        present = {_key(cookie) for cookie in devtools.call(port, path, "Storage.getCookies")["cookies"]}
        if missing := [cookie for cookie in kept if _key(cookie) not in present]:
            devtools.call(port, path, "Storage.setCookies", cookies=missing)
    except (devtools.NoAnswer, TypeError, KeyError) as error:
        log.warning("session_cookies_lost", profile=profile.name, error=str(error))


def forget(profile: Path) -> None:
    (profile / NAME).unlink(missing_ok=True)


def _key(cookie: dict[str, Any]) -> tuple[str, str, str]:
    return cookie["name"], cookie["domain"], cookie["path"]


def _write(path: Path, cookies: list[dict[str, Any]]) -> None:
    draft = path.with_suffix(".tmp")
    draft.unlink(missing_ok=True)
    with open(draft, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(cookies, file)
    draft.replace(path)


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
    """Names of folders. A shop without a home may be served by this node next; so may one whose home nobody has heard
    of for as long, which may be this very node under its former name."""
    others = ExecutionNode.objects.filter(seen_at__gt=Now() - KEPT_FOR).exclude(name=settings.AFTERTOUCH_NODE)
    shops = Shop.objects.filter(retired_at=None, platform__retired_at=None).exclude(
        lane__home__in=others.values("name")
    )
    return {registry.directory_name(shop.profile) for shop in shops.select_related("platform")}


def _left_at(folder: Path, now: datetime) -> datetime:
    """Since when this node knows that it is not needed."""
    try:
        return datetime.fromisoformat(registry.read_own(folder / LEFT).decode())
    except (OSError, ValueError):
        registry.write_own(folder / LEFT, now.isoformat())
        registry.forget_recent(folder.name)  # else its browser could be kept warm for ever
        return now


def _delete(folder: Path, ends_at: float) -> bool:
    """With the shop's home. All but its lock: of two who come later one could hold the old file and one a new one."""
    lock = Lock(folder / registry.LOCK)
    if not lock.take():
        return False
    try:
        if folder.name in _needed() or _is_open(folder):  # it may have come home since the look
            return False
        names = set(os.listdir(folder)) - {registry.LOCK, LEFT}
        for path in (registry.homes() / folder.name, *(folder / name for name in names)):
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
    if any(record and record.profile and registry.directory_name(record.profile) == folder.name for record in records):
        return True
    return any(True for _ in users_of(str(folder)))
