"""A Chromium that a test drives by Playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from rpa_tasks.browsers.launch import NoProgram, find_program
from tests.support.waiting import WAIT_LIMIT_MS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def find_chromium() -> str:
    """Return the path of the browser. Skip the test on a machine without one."""
    try:
        return find_program(os.environ.get("RPA_CHROMIUM_PATH", ""))
    except NoProgram as error:
        pytest.skip(f"missing service: {error.detail}")


@contextmanager
def launch_chromium() -> Iterator[Browser]:
    """Start a browser. Skip the test on a machine without one."""
    from playwright.sync_api import sync_playwright  # takes long, and only these tests need it

    path = find_chromium()
    # Playwright keeps an event loop in this thread, which Django would take for an async context.
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    try:
        with sync_playwright() as playwright:
            root = os.geteuid() == 0
            args = ["--no-sandbox"] if root else []
            browser = playwright.chromium.launch(executable_path=path, args=args, timeout=WAIT_LIMIT_MS)
            yield browser
            browser.close()
    finally:
        if before is None:
            del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


def open_sections(page: Page) -> None:
    """Unfold the sections of a form, as an editor does who looks for a setting."""
    page.wait_for_load_state()  # all of them are there
    for summary in page.locator("fieldset > details:not([open], .at-variant) > summary").all()[::-1]:
        summary.click()
