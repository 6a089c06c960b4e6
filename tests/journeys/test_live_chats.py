"""A look at the live chats and at how long they may be silent, in a real browser."""

from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from django.urls import reverse
from django.utils.timezone import now

from sessions.detection import policies
from sessions.frames import Frame
from sessions.models import Campaign, SilencePolicy
from sessions.policy import Policy, PolicySet
from sessions.store import sessions, stats
from sessions.store.sessions import ClaimedSilence
from tests.journeys.conftest import visit_layouts
from tests.sessions.conftest import count_nudges
from tests.support.screenshots import save_screenshot

TAGS = {"vip": (timedelta(minutes=3), 42), "new": (timedelta(seconds=30), 117), "default": (timedelta(minutes=1), 389)}


@pytest.fixture
def chats(transactional_db, valkey):
    """Some hundred chats, a few of them paused, and what became of a day's guide messages."""
    for tag, (threshold, _) in TAGS.items():
        SilencePolicy.objects.update_or_create(
            key=tag, defaults={"threshold": threshold, "jitter": timedelta(seconds=5)}
        )
    # No watcher runs, so no user falls silent while a slow machine draws a page.
    patient = {tag: Policy(timedelta(hours=1)) for tag in TAGS}
    sessions.live_store().push(PolicySet(patient))
    frames = [Frame(f"{tag}-{number}", f"{tag}-{number}", tag=tag) for tag in TAGS for number in range(TAGS[tag][1])]
    sessions.live_store().note_activity(frames)
    pauses = [Frame(each.session_id, each.user_id, sender="agent", kind="transfer") for each in frames[::23]]
    sessions.live_store().note_activity(pauses)
    for _ in range(19):
        for tag, (_, count) in TAGS.items():
            sent = count * 7
            outcomes = {"sent": sent, "answered": sent * 31 // 100, "false": sent * 13 // 1000}
            count_nudges(sessions.live_store(), tag, **outcomes)
    policies.push_policies()
    report = stats.WatcherReport()
    report.count([ClaimedSilence(str(number), "ann", "", (), "default", 1, 1, 0, 1) for number in range(372)], 23)
    stats.send_report(sessions.live_store(), report, waits=False)


def open_chat_page(page, name, *args):
    page.goto(reverse(f"admin:chat_sessions_{name}", args=args))


def test_live_chats_refresh_and_policy_edit_takes_effect(ops, chats):
    page = ops()
    open_chat_page(page, "silencepolicy_chats")
    page.click("#nav-sidebar-apps >> text=会话总览")
    page.wait_for_selector("#live-policies tr:has-text('vip') td:has-text('40')")
    save_screenshot(page, "live-chats")

    # It follows by itself what happens.
    page.evaluate("window.stayed = true")
    sessions.live_store().note_activity([Frame("one-more", "ann", tag="vip")])
    page.wait_for_selector("#live-policies tr:has-text('vip') td:has-text('41')")
    assert page.evaluate("window.stayed"), "the page was not loaded again"

    # A policy is edited; errors are shown at their fields; the store has it with the commit.
    before = sessions.live_store().claim_silent(1, timedelta(seconds=1)).versions
    open_chat_page(page, "silencepolicy_change", SilencePolicy.objects.get(key="vip").pk)
    page.fill("[name=threshold]", "1s")
    page.click("[name=_continue]")
    page.wait_for_selector(".field-threshold .errorlist, .errorlist:has-text('2s')")
    save_screenshot(page, "silence-policy")
    page.fill("[name=threshold]", "5m")
    page.fill("[name=change_reason]", "贵宾需要更多时间")
    page.click("[name=_continue]")
    page.wait_for_selector("[name=threshold][value='5m']")
    after = sessions.live_store().claim_silent(1, timedelta(seconds=1)).versions
    assert after == {policies.read_policies().version} != before

    # Its history shows the user and the former values.
    open_chat_page(page, "silencepolicy_history", SilencePolicy.objects.get(key="vip").pk)
    said = page.inner_text("#content")
    assert all(words in said for words in ("ops", "贵宾需要更多时间", "3m", "5m")), said
    save_screenshot(page, "silence-policy-history")


def test_operator_finds_why_a_chat_has_no_timer(ops, chats):
    SilencePolicy.objects.create(key="help", after="customer", threshold=timedelta(hours=1))
    policies.push_policies()
    sessions.live_store().note_activity([Frame("asked", "zoe", tag="help"), Frame("asked", "zoe", "", "agent", "tool")])
    page = ops("en")
    open_chat_page(page, "silencepolicy_chats")
    page.select_option("[name=state]", "paused")
    page.click("text=Find")
    page.wait_for_selector("#live-list tr:has-text('vip-') >> text=the chat is being transferred")
    page.select_option("[name=state]", "")
    page.fill("[name=user]", "zoe")
    page.click("text=Find")
    page.click("#live-list >> text=asked")
    page.wait_for_selector(".at-facts >> text=the timer runs")
    page.wait_for_load_state("domcontentloaded")
    found = page.inner_text("section.at-card >> nth=0")
    assert all(words in found for words in ("waiting for agent", "because of help", "waiting for customer")), found
    page.goto(reverse("admin:chat_sessions_silencepolicy_chats"))
    page.click("text=Silences >> nth=-1")
    page.wait_for_selector("#silence-list")


def test_row_chosen_by_keyboard_stays_chosen_after_a_refresh(ops, chats):
    page = ops("en")
    page.clock.install()
    open_chat_page(page, "silencepolicy_chats")
    page.keyboard.press("j")
    chosen = page.get_attribute("#live-list tr.at-here a:focus", "href")
    page.evaluate("document.querySelector('#live-list h2, #live-list p, #live-list th').dataset.former = 1")
    page.clock.run_for(4_000)
    page.wait_for_selector("#live-list [data-former]", state="detached")
    assert page.get_attribute("#live-list tr.at-here a:focus", "href") == chosen


def test_page_that_is_not_refreshed_shows_it(ops, chats):
    """The first request gets no answer, the next one does."""
    page = ops("en")
    requests = []

    def answer(route):
        if route.request.resource_type != "fetch":
            route.continue_()
            return
        requests.append(route)
        if len(requests) > 1:
            route.fulfill(content_type="text/html", body="<p id=live-chats data-live-again>fresh</p>")

    page.route(f"**{reverse('admin:chat_sessions_silencepolicy_live')}", answer)
    page.add_init_script(TIMEOUT_BY_CLOCK)
    page.clock.install(time=0)
    page.clock.pause_at(1_000)
    open_chat_page(page, "silencepolicy_live")
    with page.expect_request(lambda request: request.resource_type == "fetch"):
        page.clock.run_for(4_000)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.clock.run_for(1_000)
    assert len(requests) == 1, "one request at a time"
    assert page.locator("#live-failed").is_hidden()
    page.clock.run_for(20_000)
    page.wait_for_selector("#live-failed")
    page.clock.run_for(6_000)  # the next turn is planned before the note is shown
    page.wait_for_selector("#live-chats:has-text('fresh')")
    page.wait_for_selector("#live-failed", state="hidden")


#: The time limit of a request follows the clock of the page.
TIMEOUT_BY_CLOCK = """AbortSignal.timeout = (limit) => {
    const limited = new AbortController();
    setTimeout(() => limited.abort(), limit);
    return limited.signal;
}"""


def test_chat_pages_fit_and_load_nothing_external(ops, chats, site_url):
    """Those with figures. `test_accessibility` opens all pages."""
    Campaign.objects.create(key="double-11", starts_at=now(), ends_at=now() + timedelta(hours=7))
    for looks, language, scheme in (("", "zh-hans", "light"), ("-dark-en", "en", "dark")):
        page = ops(language, scheme)
        for name in ("silencepolicy_live", "silencepolicy_changelist"):
            for narrow in visit_layouts(page, reverse(f"admin:chat_sessions_{name}")):
                if looks or narrow:
                    save_screenshot(page, f"{name.replace('live', 'live-chats')}{looks}{narrow}")
            hosts = page.evaluate("performance.getEntriesByType('resource').map(each => new URL(each.name).host)")
            assert set(hosts) <= {urlsplit(site_url).netloc}
