"""A browser for journeys through the back office, and the pictures that they take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import Group, User
from django.db import connection

from config.local.processes import wait_until
from scheduling.management.commands.bootstrap import Command

PASSWORD = "a day in operations"
WAIT_LIMIT = 90_000  #: ms; a machine that stalls is no page that does not come
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session", autouse=True)
def static_root() -> None:
    """WhiteNoise warns where nobody has collected files yet; here the finders serve them."""
    Path(settings.STATIC_ROOT).mkdir(parents=True, exist_ok=True)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("RPA_CHROMIUM_PATH") or next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        pytest.skip("missing service: chromium (or set RPA_CHROMIUM_PATH)")
    # Playwright keeps an event loop in this thread, which Django would take for an async context.
    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()
    if before is None:
        del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture
def ops(chromium: Any, live_server: Any) -> Iterator[Callable[..., Any]]:
    """A page of somebody who is logged in, in a language and a light: of a member of `group`, who is called like it, or
    of `ops`, who may do everything. Nothing on it may violate the content security policy
    (`scheduling.web.csp`)."""
    contexts = []
    violations: list[str] = []

    def ops(language: str = "zh-hans", scheme: str = "light", width: int = 1400, group: str = "") -> Any:
        create_member(group)
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        context.add_cookies([{"name": "django_language", "value": language, "url": live_server.url}])
        context.set_default_timeout(WAIT_LIMIT)
        contexts.append(context)
        record_csp_violations(context, violations)
        page = context.new_page()
        page.goto(f"{live_server.url}/admin/")
        page.fill("[name=username]", group or "ops")
        page.fill("[name=password]", PASSWORD)
        page.click("#login-form button[type=submit]")
        page.wait_for_selector("#nav-sidebar-apps", state="attached")
        return page

    yield ops
    for context in contexts:
        context.close()
    wait_until(no_query_is_active, 30)
    assert violations == []


def no_query_is_active() -> bool:
    """A look that a closed page has begun goes on in the server; the tables are emptied next, and it would stand in the
    way of that."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
            " AND pid <> pg_backend_pid() AND state <> 'idle'"
        )
        return not cursor.fetchall()


def create_member(group: str) -> None:
    """A user with the initial rights of the group only."""
    if User.objects.filter(username=group or "ops").exists():
        return
    if not group:
        User.objects.create_superuser("ops", password=PASSWORD)
        return
    Command().grant_permissions()
    User.objects.create_user(group, password=PASSWORD, is_staff=True).groups.add(Group.objects.get(name=group))


def record_csp_violations(context: Any, violations: list[str]) -> None:
    """What the browser refuses, and what fails because of it."""

    def heard(page: Any, text: str) -> None:
        if "Content Security Policy" in text:
            violations.append(f"{page.url if page else '?'}: {text}")

    context.on("console", lambda said: heard(said.page, said.text))
    context.on("weberror", lambda error: heard(error.page, str(error.error)))
