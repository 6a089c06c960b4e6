"""Keep session cookies across restarts of a browser.

Chromium drops session cookies when it ends, and many shops keep a login in one. A browser is ended when another shop
needs its slot, or when it is old. So its session cookies are stored beside the profile and given to its next browser.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import structlog

from rpa_tasks.browsers import devtools, registry

log = structlog.get_logger(__name__)


COOKIE_FILE = ".session-cookies.json"
ANSWER_WITHIN = 2.0  #: seconds for a browser to return its cookies
COOKIE_FIELDS = (
    "name",
    "value",
    "domain",
    "path",
    "secure",
    "httpOnly",
    "sameSite",
    "priority",
    "sourceScheme",
    "partitionKey",
)


def save_session_cookies(port: int, path: str, profile: Path) -> None:
    """Store the session cookies before the browser is asked to close. Raises `devtools.NoAnswer`."""
    cookies = devtools.send_command(port, path, "Storage.getCookies", timeout=ANSWER_WITHIN)["cookies"]
    lasting = [{key: cookie[key] for key in COOKIE_FIELDS if key in cookie} for cookie in cookies if cookie["session"]]
    try:
        registry.replace_json(profile / COOKIE_FILE, lasting)
    except OSError as error:
        log.warning("session_cookies_not_kept", profile=profile.name, error=str(error))


def restore_session_cookies(port: int, path: str, profile: Path) -> None:
    """Restore the cookies in the profile's new browser. A cookie that it already has is newer and stays."""
    try:
        kept = json.loads(registry.read_own(profile / COOKIE_FILE))
    except (OSError, ValueError):
        return
    try:
        present = {_cookie_key(cookie) for cookie in devtools.send_command(port, path, "Storage.getCookies")["cookies"]}
        if missing := [cookie for cookie in kept if _cookie_key(cookie) not in present]:
            devtools.send_command(port, path, "Storage.setCookies", cookies=missing)
    except (devtools.NoAnswer, TypeError, KeyError) as error:
        log.warning("session_cookies_lost", profile=profile.name, error=str(error))


def delete_session_cookies(profile: Path) -> None:
    (profile / COOKIE_FILE).unlink(missing_ok=True)


def _cookie_key(cookie: dict[str, Any]) -> tuple[str, str, str]:
    return cookie["name"], cookie["domain"], cookie["path"]
