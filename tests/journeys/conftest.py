"""A browser for journeys through the back office, and the pictures that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.conf import settings
from django.contrib.auth.models import Group, User
from django.db import connection
from django.test import Client

from config.local.processes import wait_until
from scheduling.management.commands.bootstrap import Command
from tests.support.chromium import launch_chromium
from tests.support.waiting import WAIT_LIMIT_MS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

WIDE, NARROW = 1400, 390  #: px


@pytest.fixture(scope="session", autouse=True)
def static_root() -> None:
    """WhiteNoise warns if no files are collected; the finders serve them here."""
    Path(settings.STATIC_ROOT).mkdir(parents=True, exist_ok=True)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for the journeys of a file. It does not outlive them: asyncio cannot run beside Playwright."""
    with launch_chromium() as browser:
        yield browser


@pytest.fixture
def site_url(live_server) -> str:
    """The address of the web server; a journey with WebSockets names another one."""
    return str(live_server.url)


@pytest.fixture
def ops(chromium, site_url, transactional_db) -> Iterator[Callable[..., Page]]:
    """Open empty pages, logged in as a member of `group` or as `ops`, who may do everything.

    No page may violate the content security policy (`scheduling.web.middleware`).
    """
    contexts = []
    violations: list[str] = []

    def ops(language: str = "zh-hans", scheme: str = "light", width: int = 1400, group: str = "") -> Page:
        context = chromium.new_context(base_url=site_url, color_scheme=scheme, viewport={"width": width, "height": 900})
        contexts.append(context)
        add_cookies(context, site_url, language, get_member(group))
        context.set_default_timeout(WAIT_LIMIT_MS)
        record_csp_violations(context, violations)
        return context.new_page()

    yield ops
    for context in contexts:
        context.close()
    wait_until(no_query_is_active, 30)
    assert violations == []


def visit_layouts(page: Page, address: str) -> Iterator[str]:
    """Open a page and yield twice: "" in a wide window, "-narrow" in that of a telephone. Nothing is wider than it.

    The width is a matter of style sheets, so the server need not draw the page again.
    """
    page.set_viewport_size({"width": WIDE, "height": 900})
    page.goto(address)
    check_width(page)
    for look, width in (("", WIDE), ("-narrow", NARROW)):
        page.set_viewport_size({"width": width, "height": 900})
        yield look


def check_width(page: Page) -> None:
    assert list(list_overflows(page)) == []


def list_overflows(page: Page) -> Iterator[str]:
    """Return the windows, wide and as narrow as a telephone's, that the page is wider than."""
    for width in (NARROW, WIDE):
        page.set_viewport_size({"width": width, "height": 900})
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if overflow > 0:
            yield f"{page.url} is {overflow} px wider than {width} px"


def no_query_is_active() -> bool:
    """The request of a closed page continues in the server and would block the emptying of tables."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
            " AND pid <> pg_backend_pid() AND state <> 'idle'"
        )
        return not cursor.fetchall()


def get_member(group: str) -> User:
    """A user with the initial rights of the group only."""
    if found := User.objects.filter(username=group or "ops").first():
        return found
    if not group:
        return User.objects.create_superuser("ops")
    Command().grant_permissions()
    user = User.objects.create_user(group, is_staff=True)
    user.groups.add(Group.objects.get(name=group))
    return user


def add_cookies(context: BrowserContext, url: str, language: str, user: User | None = None) -> None:
    """Choose the language and log in. The form of the login is the subject of `test_people` alone."""
    cookies = {"django_language": language}
    if user is not None:
        client = Client()
        client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        cookies["sessionid"] = client.cookies["sessionid"].value
    context.add_cookies([{"name": name, "value": value, "url": url} for name, value in cookies.items()])


def record_csp_violations(context: BrowserContext, violations: list[str]) -> None:
    """What the browser refuses, and what fails because of it."""

    def heard(page: Page, text: str) -> None:
        if "Content Security Policy" in text:
            violations.append(f"{page.url if page else '?'}: {text}")

    context.on("console", lambda said: heard(said.page, said.text))
    context.on("weberror", lambda error: heard(error.page, str(error.error)))
