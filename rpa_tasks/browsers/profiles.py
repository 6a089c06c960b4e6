"""The cookies that Chromium forgets when it ends: many shops keep a login in one that is meant for "this session".

A browser is ended whenever its slot is needed by another shop, or it has grown old. To the shop's platform that must
not look like a person who logs out; so these cookies are kept beside the profile and given to its next browser.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import structlog

from rpa_tasks.browsers import devtools, places

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
        kept = json.loads(places.read_own(profile / NAME))
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
