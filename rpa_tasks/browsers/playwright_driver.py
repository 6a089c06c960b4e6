"""Run Playwright for the pool and the evidence, in a separate process: timed checks and snapshots.

    python -m rpa_tasks.browsers.playwright_driver snapshot --port 9222 --dir DIR

prints one JSON object and exits with 0, or `{"error": …}` and 1. So no event loop and no driver process run in a
worker. `serve_health_checks` checks browsers for the maintainer: one question per line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Error, Page, Playwright, sync_playwright

from rpa_tasks.browsers import devtools

LIMIT = 1_000_000  #: bytes of a snapshot's screenshot, and of its HTML
TIMEOUT = 10.0  #: seconds
PAGE = "data:text/html,<title>check</title><p>checked</p>"
#: The first of these whose screenshot is within the limit is used.
PICTURES: tuple[dict[str, Any], ...] = (
    {"type": "png"},
    {"type": "jpeg", "quality": 70},
    {"type": "jpeg", "quality": 20},
)


@dataclass(frozen=True, slots=True)
class Health:
    """Result of a timed page."""

    ok: bool
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The most recent page."""

    screenshot: bytes
    html: str
    url: str
    title: str


def take_snapshot(port: int, *, timeout: float = TIMEOUT) -> Snapshot:
    """Return the page that the browser shows, screenshot and HTML at most 1 MB each.

    Raises: `playwright.Error`, `devtools.NoAnswer`.
    """
    with _open_connection(port, timeout) as browser:
        page = _latest_page(browser, port)
        html = page.content().encode(errors="replace")[:LIMIT].decode(errors="ignore")
        return Snapshot(screenshot=_take_screenshot(page, timeout), html=html, url=page.url, title=page.title())


@contextmanager
def _open_connection(port: int, timeout: float) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield _connect(playwright, port, timeout)


def _connect(playwright: Playwright, port: int, timeout: float) -> Browser:
    """Connect to the browser. Closing the result, or leaving Playwright, only disconnects.

    Without its defaults it leaves downloads as the pool has set them.
    """
    return playwright.chromium.connect_over_cdp(f"http://127.0.0.1:{port}", timeout=timeout * 1000, no_defaults=True)


def _check_navigation(browser: Browser, profile_dir: str, timeout: float) -> Health:
    began = time.monotonic()
    try:
        page = browser.contexts[0].new_page()
        try:
            page.goto(PAGE, timeout=timeout * 1000)
            shown = page.inner_text("p", timeout=timeout * 1000)
            seconds = time.monotonic() - began
            page.goto("chrome://version", timeout=timeout * 1000)
            profile = page.inner_text("#profile_path", timeout=timeout * 1000)
        finally:
            page.close()
    except (Error, IndexError) as error:
        return Health(False, time.monotonic() - began, _first_line(error))
    if shown != "checked":
        return Health(False, seconds, "the page was not shown")
    if Path(profile).parent.resolve() != Path(profile_dir).resolve():
        return Health(False, seconds, f"another profile: {profile}")
    return Health(True, seconds)


def _latest_page(browser: Browser, port: int) -> Page:
    """Return the page that was active last, by the browser's order. Playwright's order does not show that."""
    ids = [page["id"] for page in devtools.list_tabs(port)]
    ranked: list[tuple[bool, int, Page]] = []
    for page in (page for context in browser.contexts for page in context.pages):
        target = browser.contexts[0].new_cdp_session(page).send("Target.getTargetInfo")["targetInfo"]["targetId"]
        ranked.append((page.url == "about:blank", ids.index(target) if target in ids else len(ids), page))
    if not ranked:
        raise Error("The browser has no page.")
    return min(ranked, key=lambda each: each[:2])[2]


def _take_screenshot(page: Page, timeout: float) -> bytes:
    picture = b""
    for form in PICTURES:
        picture = page.screenshot(timeout=timeout * 1000, animations="disabled", **form)
        if len(picture) <= LIMIT:
            break
    return picture if len(picture) <= LIMIT else b""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# --- the process of its own -------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    order = _build_driver_parser().parse_args(words)
    if order.what == "examine":
        serve_health_checks()
        return 0
    # Some answers of a page have no time limit: an endless script would block this process forever.
    signal.alarm(int(order.timeout) + 5)
    try:
        _print_answer(_print_snapshot(order))
    except (Error, OSError, IndexError, devtools.NoAnswer) as error:
        _print_answer({"error": _first_line(error)})
        return 1
    return 0


def serve_health_checks() -> None:
    """Print {"ready": true}; then answer one question per line with one health per line.

    A question is {"port", "profile", "seconds"}.
    """
    with sync_playwright() as playwright:
        _print_answer({"ready": True})
        for line in sys.stdin:
            _print_answer(dataclasses.asdict(_check_browser(playwright, **json.loads(line))))


def _check_browser(playwright: Playwright, port: int, profile: str, seconds: float) -> Health:
    """Check a browser and disconnect: Playwright dismisses each dialog of a browser that it is connected to.

    A browser that fails the check may not even disconnect. The maintainer ends it.
    """
    try:
        browser = _connect(playwright, port, seconds)
        health = _check_navigation(browser, profile, seconds)
        if health.ok:
            browser.close()
    except Error as error:
        return Health(False, 0.0, _first_line(error))
    return health


def _print_snapshot(order: argparse.Namespace) -> dict[str, Any]:
    found = take_snapshot(order.port, timeout=order.timeout)
    order.dir.mkdir(parents=True, exist_ok=True)
    (order.dir / "screenshot").write_bytes(found.screenshot)
    (order.dir / "page.html").write_text(found.html, encoding="utf-8")
    return {"screenshot": "screenshot", "html": "page.html", "url": found.url, "title": found.title}


def _build_driver_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rpa_tasks.browsers.playwright_driver")
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("examine")
    command = commands.add_parser("snapshot")
    command.add_argument("--port", type=int, required=True)
    command.add_argument("--timeout", type=float, default=TIMEOUT)
    command.add_argument("--dir", type=Path, required=True)
    return parser


def _print_answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
