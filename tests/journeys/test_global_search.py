"""The search of every page by keyboard: it opens, chooses, leads on, and closes."""

from typing import TYPE_CHECKING

from django.urls import reverse

from scheduling.operations.commands import update_customer
from tests.support.screenshots import save_screenshot

if TYPE_CHECKING:
    pass


CHOSEN = "#global-search [aria-selected=true]"


def test_search_by_keyboard_opens_a_result(ops, matrix):
    matrix.node("guide")
    update_customer("wang", {"name": "欧阳小明"})
    page = ops()
    page.goto(reverse("admin:scheduling_touch_changelist"))
    page.keyboard.press("/")
    page.wait_for_selector("#global-search[open]")
    page.keyboard.type("暂停")
    page.wait_for_selector("#global-search >> text=暂停渠道 log")
    save_screenshot(page, "search")
    page.keyboard.press("Escape")
    page.wait_for_selector("#global-search:not([open])", state="attached")

    page.keyboard.press("Control+k")
    page.wait_for_selector("#global-search[open]")
    page.keyboard.type("阳小")  # the earlier term was selected, so this replaces it
    page.wait_for_selector(f"{CHOSEN}:has-text('欧阳小明')")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('欧阳小明')")


def test_search_arrows_choose(ops, matrix):
    page = ops("en", width=390)
    page.goto(reverse("admin:index"))
    page.click("#menu-button")
    page.click("#search-button")
    page.keyboard.type("pause")
    page.wait_for_selector(f"{CHOSEN}:has-text('Pauses')")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(f"{CHOSEN}:has-text('Pause everything')")
    save_screenshot(page, "search-narrow")
    page.keyboard.press("Enter")
    page.wait_for_selector("select[name=scope]")


def test_search_without_login_keeps_what_is_typed(ops, matrix):
    page = ops("en")
    page.goto(reverse("admin:scheduling_pause_add"))
    page.fill("[name=reason]", "a long reason")
    page.context.clear_cookies()
    page.keyboard.press("Control+k")
    page.wait_for_selector("#global-search >> text=You are logged out.")
    assert page.input_value("[name=reason]") == "a long reason"


def test_enter_opens_no_result_of_an_earlier_term(ops, matrix):
    """The answer for the term is still under way."""
    page = ops("en")
    held = []
    page.goto(reverse("admin:index"))
    page.keyboard.press("Control+k")
    page.keyboard.type("pause")
    page.wait_for_selector(f"{CHOSEN}:has-text('Pauses')")
    page.route("**/search/?s=pauses%20webhooks", lambda route: held.append(route))
    with page.expect_request("**/search/?s=pauses%20webhooks"):
        page.fill("#global-search input", "pauses webhooks")
    page.keyboard.press("Enter")
    page.wait_for_selector("#global-search[open]")
    held[0].fulfill(body='<a role="option" href="/admin/scheduling/touch/" id="found-1-1">Touches</a>')
    page.wait_for_selector(f"{CHOSEN}:has-text('Touches')")
    page.keyboard.press("Enter")
    page.wait_for_url("**/scheduling/touch/")
