"""Keep session cookies across restarts of a browser.

Chromium drops session cookies when it ends, and many shops keep a login in one. A browser is ended when another shop
needs its slot, or when it is old. So its session cookies are stored beside the profile and given to its next browser.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import structlog

from rpa_tasks.browsers import devtools, registry

log = structlog.get_logger(__name__)


NAME = ".session-cookies.json"
ANSWER_WITHIN = 2.0  #: seconds for a browser to return its cookies
KEPT = ("name", "value", "domain", "path", "secure", "httpOnly", "sameSite", "priority", "sourceScheme", "partitionKey")


def keep(port: int, path: str, profile: Path) -> None:
    """Store the session cookies before the browser is asked to close. Raises `devtools.NoAnswer`."""
    cookies = devtools.call(port, path, "Storage.getCookies", timeout=ANSWER_WITHIN)["cookies"]
    lasting = [{key: cookie[key] for key in KEPT if key in cookie} for cookie in cookies if cookie["session"]]
    try:
        _write(profile / NAME, lasting)
    except OSError as error:
        log.warning("session_cookies_not_kept", profile=profile.name, error=str(error))


def bring_back(port: int, path: str, profile: Path) -> None:
    """Restore the cookies in the profile's new browser. A cookie that it already has is newer and stays."""
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
