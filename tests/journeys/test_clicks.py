"""Common tasks take as many clicks as `docs/explanation/clicks.md` states. Each is done in a browser."""

import re
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from config.environment import ROOT
from scheduling.operations import undo as undo_window
from tests.scheduling.core.conftest import pass_time
from tests.support.screenshots import save_screenshot

if TYPE_CHECKING:
    pass

MENU = "#nav-sidebar-apps >> text="
UNDO = "button:has-text('Undo now')"
SUBMIT = "#content-main button[type=submit]"
UNDONE = "text=Undone"


class ClickCounter:
    """Click in a page and count it. Typing and keys do not count."""

    def __init__(self, page):
        self.page = page
        self.clicks = 0

    def click(self, *targets):
        for target in targets:
            self.page.click(target)
            self.clicks += 1

    def choose(self, target, value):
        self.page.select_option(target, value)
        self.clicks += 1

    def search(self, term, expected):
        """Open the first result of the search by keyboard."""
        self.page.keyboard.press("Control+k")
        self.page.wait_for_selector("#global-search[open]")
        self.page.keyboard.type(term)
        self.page.wait_for_selector(f"#global-search [aria-selected=true]:has-text('{expected}')")
        self.page.keyboard.press("Enter")

    def give_reason(self):
        self.page.fill("[name=reason]", "r")


def read_documented_counts():
    page = (ROOT / "docs" / "explanation" / "clicks.md").read_text("utf-8")
    return dict(re.findall(r"^\| ([^|]+?) \|[^|]*\| (\d+) \|$", page, re.MULTILINE))


@pytest.fixture
def count(ops, monkeypatch):
    """Run journeys one after the other, each from the overview unless it follows another one."""
    monkeypatch.setattr(undo_window, "UNDO_WINDOW", timedelta(hours=1))  # a slow machine takes longer than ten seconds
    page = ops("en")

    def count(journeys):
        found = {}
        for name, journey in journeys.items():
            if not name.endswith("undo it"):
                page.goto("/admin/")
            counter = ClickCounter(page)
            journey(counter)
            found[name] = str(counter.clicks)
        return found

    return count


def undo(hand):
    hand.page.wait_for_selector(UNDO)
    hand.click(UNDO)
    hand.page.wait_for_selector(UNDONE)


def check(found):
    documented = read_documented_counts()
    assert found == {name: documented.get(name) for name in found}


def test_clicks_of_touches_and_failures_match_the_table(count, matrix, record_event):
    from scheduling.models import FailedTask, Touch
    from scheduling.operations import bulk_actions
    from tests.scheduling.core.conftest import deliver

    matrix.node("guide", delay=timedelta(days=1))
    matrix.node("broken", "order.paid", template=matrix.template("broken", body="{{ event.data.order_no }}"))
    (waiting,) = record_event().task_ids
    for number in range(8):
        deliver(record_event("order.paid", f"user-{number}").task_ids)
    pass_time(minutes=1)

    def explain(hand):
        hand.search("ann", "ann")
        hand.page.wait_for_selector("h1:has-text('ann')")
        hand.click("a[href*='/touch/'][href$='/change/'] >> nth=0")
        hand.page.wait_for_selector(".at-timeline")

    def cancel(hand):
        hand.search(str(waiting), "guide")
        hand.page.wait_for_selector(".at-timeline")
        hand.click("a[href$='/cancel/']", SUBMIT)
        save_screenshot(hand.page, "undo-cancel")

    def retry(hand):
        hand.click(f"{MENU}Failed tasks", "#result_list tbody th a", "a.at-button:has-text('Retry') >> nth=0")
        hand.give_reason()
        hand.click(SUBMIT)

    def edit(hand):
        hand.click(f"{MENU}Failed tasks", "#result_list tbody th a", "a.at-button:has-text('Edit and retry')")
        hand.page.fill("[name=body]", "your order has been sent")
        hand.give_reason()
        hand.click(SUBMIT)

    def retry_cause(hand):
        hand.click(f"{MENU}Failed tasks", "a:has-text('Causes')", "tr a:has-text('show them')")
        hand.click("a[href*='/matching/retry/']")
        hand.give_reason()
        hand.click(SUBMIT)
        hand.page.wait_for_selector("text=0 of 7")

    check(count({
        "see why a customer got or did not get a message": explain,
        "cancel a waiting touch": cancel,
        "cancel a waiting touch, and undo it": undo,
        "retry a failed task": retry,
        "retry a failed task, and undo it": undo,
        "correct the text of a failed task and send it": edit,
        "retry all failures of one cause": retry_cause,
    }))  # fmt: skip
    assert Touch.objects.filter(retry_of=waiting, state="scheduled").exists()
    pass_time(seconds=10)
    bulk_actions.continue_bulk_actions()
    assert not FailedTask.objects.filter(state="open").exists()


def test_clicks_of_configuration_match_the_table(count, matrix):
    from scheduling.experiments import drafts
    from scheduling.models import Node, Pause

    node = matrix.node("guide", name="Guide", delay=timedelta(minutes=15))

    def open_node(hand):
        hand.click(f"{MENU}Matrix", f"#node-{node.pk} .at-node-title")

    def pause(hand):
        hand.search("pause channel log", "Pause channel log")
        hand.page.wait_for_selector("[name=scope]")
        hand.click(SUBMIT)
        save_screenshot(hand.page, "undo-pause")

    def change_delay(hand):
        open_node(hand)
        hand.page.fill("[name=delay]", "20m")
        hand.click("[name=_save]")
        hand.page.wait_for_selector(".at-node:has-text('20 min')")

    def switch_off(hand):
        hand.click(f"{MENU}Matrix", f"#node-{node.pk} [role=switch]")

    def restore(hand):
        open_node(hand)
        hand.click("a[href$='/history/']", "#change-history tbody tr:last-child a >> nth=0")
        hand.click("a:has-text('Restore this version')", "[name=_save]")
        hand.page.wait_for_selector(".at-node:has-text('15 min')")

    def try_edit(hand):
        open_node(hand)
        hand.page.fill("[name=delay]", "30m")
        hand.click("[name=_try_draft]", "button:has-text('Start the replay')")
        hand.page.wait_for_selector("progress")
        assert drafts.run_next_replay()

    def publish(hand):
        hand.search("drafts", "All drafts")
        hand.click("#result_list tbody th a", "a:has-text('Publish the draft')")
        hand.give_reason()
        hand.click(SUBMIT)
        hand.page.wait_for_selector("text=The draft is live.")

    check(count({
        "pause a channel": pause,
        "pause a channel, and undo it": undo,
        "change the delay of a node": change_delay,
        "switch a node off": switch_off,
        "switch a node off, and undo it": undo,
        "restore an old version of a node": restore,
        "try an edit on the last seven days": try_edit,
        "publish a draft": publish,
    }))  # fmt: skip
    node.refresh_from_db()
    assert (node.delay, node.enabled) == (timedelta(minutes=30), True)
    assert not Pause.objects.exists()
    assert Node.history.filter(history_user__username="ops").count() >= 5


def test_clicks_of_an_invitation_match_the_table(count):
    def invite(hand):
        hand.search("add invitation", "Add: invitation")
        hand.page.fill("[name=name]", "Mei")
        hand.choose("[name=role]", "operator")
        hand.click("[name=_save]")
        hand.page.wait_for_selector("#invitation-link")

    check(count({"invite a colleague": invite}))
