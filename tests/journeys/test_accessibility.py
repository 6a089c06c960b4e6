"""axe-core on every page of the back office: both languages, light and dark."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import TYPE_CHECKING

import pytest
from django.contrib.auth.models import User
from django.urls import reverse
from pytest_django.live_server_helper import LiveServer

from tests.journeys.conftest import WAIT_LIMIT, add_cookies, record_csp_violations
from tests.security import admin_pages
from tests.security.admin_pages import page_addresses
from tests.support.matrix import MatrixBuilder, RecordEvent

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

#: Rules of less than serious impact that hold too: one main, one h1, landmarks that a reader can tell apart.
STRUCTURE = (
    "landmark-one-main", "landmark-no-duplicate-main", "landmark-main-is-top-level", "landmark-unique",
    "landmark-no-duplicate-banner", "landmark-no-duplicate-contentinfo", "region", "page-has-heading-one",
)  # fmt: skip
#: A scheme changes colours, a language changes texts and names; each rule runs where its result can differ.
COLOURS = ("color-contrast", "link-in-text-block")
NAMES = (
    "aria-command-name", "aria-dialog-name", "aria-input-field-name", "aria-progressbar-name",
    "aria-toggle-field-name", "button-name", "document-title", "empty-heading", "html-has-lang", "html-lang-valid",
    "image-alt", "input-button-name", "label", "label-content-name-mismatch", "landmark-one-main", "landmark-unique",
    "link-name", "scrollable-region-focusable", "select-name", "summary-name", "svg-img-alt", "target-size",
    "valid-lang",
)  # fmt: skip
ALL_RULES: dict[str, tuple[str, ...]] = {"light": (), "dark": COLOURS}
TEXT_RULES: dict[str, tuple[str, ...]] = {"light": NAMES}
TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
#: A colour under way from one scheme to the other is none of either.
STYLED = "[...document.querySelectorAll('link[rel=stylesheet]')].every((each) => each.sheet)"
STILL = """() => { const sheet = new CSSStyleSheet(); sheet.replaceSync("* { transition: none !important; }");
    document.adoptedStyleSheets = [sheet]; }"""
RUN = """async ([tags, rules, structure, skipped, dark]) => {
    document.documentElement.classList.toggle("dark", dark); // Unfold reads the scheme where it loads
    const found = await axe.run(skipped ? {exclude: [[skipped]]} : document, {
        runOnly: rules.length ? {type: "rule", values: rules} : {type: "tag", values: tags},
        resultTypes: ["violations"], preload: false, iframes: false,
    });
    return found.violations.filter(each => ["serious", "critical"].includes(each.impact) || structure.includes(each.id))
        .flatMap(each => each.nodes.map(node => [each.id, node.html.slice(0, 300),
            ...node.any.concat(node.none, node.all).map(check => check.message)].join(" | ")))
        .concat(document.querySelectorAll("main").length === 1 ? [] : ["not one main"]);
}"""


@pytest.fixture
def admin_user(matrix: MatrixBuilder, record_event: RecordEvent) -> User:
    admin_pages.build(matrix, record_event)
    return User.objects.create_superuser("admin", password="x")


def open_context(chromium: Browser, url: str, language: str, user: User | None, violations: list[str]) -> Page:
    context = chromium.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(WAIT_LIMIT)
    add_cookies(context, url, language, user)
    record_csp_violations(context, violations)
    return context.new_page()


def run_axe(page: Page, url: str, schemes: dict[str, tuple[str, ...]], menu_seen: bool) -> dict[str, list[str]]:
    """Return the violations by scheme. The menu of the side is the same on every page and is read on the first one."""
    answer = page.goto(url, wait_until="domcontentloaded")
    assert answer is not None
    assert answer.status == 200, (url, answer.status)
    page.wait_for_function(STYLED)
    page.evaluate(STILL)
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    found = {}
    for scheme, rules in schemes.items():
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        skipped = "#nav-sidebar" if menu_seen else ""
        found[scheme] = page.evaluate(RUN, [TAGS, rules, STRUCTURE, skipped, scheme == "dark"])
    page.emulate_media(color_scheme="light")
    return {scheme: violations for scheme, violations in found.items() if violations}


@pytest.mark.timeout(900)  # about 200 pages
@pytest.mark.parametrize("language", ["zh-hans", "en"])
def test_pages_violate_no_accessibility_rule(
    chromium: Browser, live_server: LiveServer, admin_user: User, language: str
) -> None:
    """Each page is loaded once; a change of the scheme loads nothing."""
    schemes = ALL_RULES if language == "zh-hans" else TEXT_RULES
    refused: list[str] = []
    began = time.monotonic()
    page = open_context(chromium, live_server.url, language, None, refused)
    login = reverse("admin:login")
    found = {login: run_axe(page, f"{live_server.url}{login}", schemes, menu_seen=False)}
    page.context.close()
    page = open_context(chromium, live_server.url, language, admin_user, refused)
    # All history pages have one layout, so two models stand for them, and the form of a row stands for the empty one.
    # English pages differ in texts only: their forms, whose labels are texts of the same catalogue, are left out.
    pages = page_addresses(admin_user, histories=2, forms=language != "en", empty_forms=False)
    for address in [*pages, reverse("demo_chat")]:
        found[address] = run_axe(page, f"{live_server.url}{address}", schemes, menu_seen=len(found) > 1)
    page.context.close()
    print(f"axe, {language}: {len(found)} pages in {time.monotonic() - began:.0f} s")
    lines = [
        f"{address} {scheme} {each}"
        for address, schemes_found in found.items()
        for scheme, violations in schemes_found.items()
        for each in violations
    ]
    assert lines == [], "\n".join(lines)
    assert refused == []
