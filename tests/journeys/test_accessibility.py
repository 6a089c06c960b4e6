"""Every page of the back office: axe-core in light and dark, and nothing is wider than the window or a telephone's.

No page may violate the content security policy.
"""

from importlib.resources import files
from typing import TYPE_CHECKING

import pytest
from django.contrib.auth.models import User
from django.urls import reverse

from scheduling.models import Invitation
from tests.journeys.conftest import WIDE, add_cookies, list_overflows, record_csp_violations
from tests.security import admin_pages
from tests.security.admin_pages import page_addresses
from tests.support.waiting import WAIT_LIMIT_MS

if TYPE_CHECKING:
    pass


#: Rules of less than serious impact that hold too: one main, one h1, landmarks that a reader can tell apart.
STRUCTURE = (
    "landmark-one-main", "landmark-no-duplicate-main", "landmark-main-is-top-level", "landmark-unique",
    "landmark-no-duplicate-banner", "landmark-no-duplicate-contentinfo", "region", "page-has-heading-one",
)  # fmt: skip
#: A scheme changes colours; in another language texts and names are others. Each rule runs where its result can differ.
COLOURS = ("color-contrast", "link-in-text-block")
NAMES = (
    "aria-command-name", "aria-dialog-name", "aria-input-field-name", "aria-progressbar-name",
    "aria-toggle-field-name", "button-name", "document-title", "empty-heading", "html-has-lang", "html-lang-valid",
    "image-alt", "input-button-name", "label", "label-content-name-mismatch", "landmark-one-main", "landmark-unique",
    "link-name", "scrollable-region-focusable", "select-name", "summary-name", "svg-img-alt", "target-size",
    "valid-lang",
)  # fmt: skip
CHINESE_RULES = {"light": (), "dark": COLOURS}
ENGLISH_RULES = {"light": NAMES}
#: A list, a form and a page with figures have one template each. In English, one page of each template is read.
ENGLISH = (
    "index", "account", "password_change", "scheduling_touch_workers", "scheduling_touch_changelist",
    "scheduling_failedtask_groups", "scheduling_node_matrix", "scheduling_node_add", "scheduling_event_preview",
    "scheduling_configdraft_mine", "scheduling_complaint_rates", "scheduling_pause_add",
    "scheduling_customerimport_add", "chat_sessions_silencepolicy_live", "rpa_tasks_shop_schedules",
    "rpa_tasks_shop_schedule_add",
)  # fmt: skip
#: These ask whether to go on, on one template whatever the row.
ALIKE = ("retire", "bring-back", "pause-row", "resume-row", "pause-or-resume")
TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
#: A colour under way from one scheme to the other is none of either.
RUN = """async ([tags, rules, structure, skipped, dark]) => {
    while (![...document.querySelectorAll("link[rel=stylesheet]")].every(each => each.sheet))
        await new Promise(requestAnimationFrame);
    await document.fonts.ready; // an icon is a word until its font is there
    const still = new CSSStyleSheet();
    still.replaceSync("* { transition: none !important; }");
    document.adoptedStyleSheets = [still];
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
def admin_user(matrix, record_event):
    admin_pages.build(matrix, record_event)
    return User.objects.create_superuser("admin", password="x")


def list_pages(user):
    """All history pages have one layout, so two models stand for them, and the form of a row for the empty one."""
    alike = set()
    for address in page_addresses(user, histories=2, empty_forms=False):
        kind = address.partition("?")[0].rstrip("/").rpartition("/")[2]
        if kind not in alike:
            yield address
        if kind in ALIKE:
            alike.add(kind)
    yield reverse("demo_chat")


def read_pages(chromium, url, language, user, addresses, schemes):
    """Return what is wrong. The menu of the side is the same on every page and is read on the first one."""
    context = chromium.new_context(viewport={"width": WIDE, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(WAIT_LIMIT_MS)
    add_cookies(context, url, language, user)
    context.add_init_script(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    wrong = []
    record_csp_violations(context, wrong)
    page, skipped = context.new_page(), ""
    for address in addresses:
        wrong += read_page(page, f"{url}{address}", schemes, skipped)
        skipped = "#nav-sidebar" if user else ""
    context.close()
    return wrong


def read_page(page, url, schemes, skipped):
    """The page is loaded once; a change of the scheme or the width loads nothing."""
    answer = page.goto(url, wait_until="domcontentloaded")
    assert answer is not None
    assert answer.status == 200, (url, answer.status)
    for scheme, rules in schemes.items():
        page.emulate_media(color_scheme=scheme)
        for violation in page.evaluate(RUN, [TAGS, rules, STRUCTURE, skipped, scheme == "dark"]):
            yield f"{url} {scheme} {violation}"
    page.emulate_media(color_scheme="light")
    yield from list_overflows(page)


@pytest.mark.timeout(900)  # about 200 pages
def test_pages_violate_no_accessibility_rule_and_fit(chromium, live_server, admin_user):
    login = [reverse("admin:login")]
    english = [reverse(f"admin:{name}") for name in ENGLISH]
    english.append(reverse("admin:scheduling_invitation_change", args=[Invitation.objects.get().pk]))  # a long state
    wrong = [
        *read_pages(chromium, live_server.url, "zh-hans", None, login, CHINESE_RULES),
        *read_pages(chromium, live_server.url, "zh-hans", admin_user, list_pages(admin_user), CHINESE_RULES),
        *read_pages(chromium, live_server.url, "en", None, login, ENGLISH_RULES),
        *read_pages(chromium, live_server.url, "en", admin_user, english, ENGLISH_RULES),
    ]
    assert wrong == [], "\n".join(wrong)
