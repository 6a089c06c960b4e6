"""A look at the live chats and at how long they may be silent, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.urls import reverse
from django.utils.timezone import now

from sessions.detection import policies
from sessions.frames import Frame
from sessions.models import Campaign, NudgeTally, SilencePolicy
from sessions.policy import Policy, PolicySet
from sessions.store import sessions, stats
from sessions.store.sessions import ClaimedSilence
from tests.screenshots import save_screenshot

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

WAIT_LIMIT = 60_000  #: ms for what the page must come to say by itself
TAGS = {"vip": (timedelta(minutes=3), 42), "new": (timedelta(seconds=30), 117), "default": (timedelta(minutes=1), 389)}


@pytest.fixture
def chats(transactional_db: None, valkey: Any) -> None:
    """Some hundred chats, a few of them paused, and what became of a day's guide messages."""
    for tag, (threshold, _) in TAGS.items():
        SilencePolicy.objects.update_or_create(
            tag=tag, defaults={"threshold": threshold, "jitter": timedelta(seconds=5)}
        )
    # Nobody watches here; so nobody falls silent while a slow machine draws a page.
    patient = {tag: Policy(timedelta(hours=1)) for tag in TAGS}
    sessions.live_store().push(PolicySet(patient))
    frames = [Frame(f"{tag}-{number}", f"{tag}-{number}", tag=tag) for tag in TAGS for number in range(TAGS[tag][1])]
    sessions.live_store().note_activity(frames)
    pauses = [Frame(each.session_id, each.user_id, sender="agent", kind="transfer") for each in frames[::23]]
    sessions.live_store().note_activity(pauses)
    for hours in range(1, 20):
        for tag, (_, count) in TAGS.items():
            sent = count * 7
            NudgeTally.objects.create(
                at=now() - timedelta(hours=hours),
                tag=tag,
                sent=sent,
                answered=sent * 31 // 100,
                false=sent * 13 // 1000,
            )
    policies.push_policies()
    report = stats.WatcherReport()
    report.count([ClaimedSilence(str(number), "ann", "", "default", 1, 0, 1) for number in range(372)], 23)
    stats.send_report(sessions.live_store(), report, set(TAGS), waits=False)


def open_chat_page(page: Any, live_server: Any, name: str, *args: Any) -> None:
    page.goto(f"{live_server.url}{reverse(f'admin:chat_sessions_{name}', args=args)}")


def test_live_chats_refresh_and_policy_edit_takes_effect(
    ops: Callable[..., Any], chats: None, live_server: Any
) -> None:
    page = ops()
    page.set_default_timeout(WAIT_LIMIT)
    page.click("#nav-sidebar-apps >> text=会话总览")
    page.wait_for_selector("#live-tags tr:has-text('vip') td:has-text('40')")
    save_screenshot(page, "live-chats")

    # It follows by itself what happens.
    page.evaluate("window.stayed = true")
    sessions.live_store().note_activity([Frame("one-more", "ann", tag="vip")])
    page.wait_for_selector("#live-tags tr:has-text('vip') td:has-text('41')")
    assert page.evaluate("window.stayed"), "the page was not loaded again"

    # A policy is edited; what does not fit is said at its field; the store has it with the commit.
    before = sessions.live_store().claim_silent(1, timedelta(seconds=1)).versions
    open_chat_page(page, live_server, "silencepolicy_change", SilencePolicy.objects.get(tag="vip").pk)
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

    # And its history says who did it, and what it was before.
    open_chat_page(page, live_server, "silencepolicy_history", SilencePolicy.objects.get(tag="vip").pk)
    said = page.inner_text("#content")
    assert all(words in said for words in ("ops", "贵宾需要更多时间", "3m", "5m")), said
    save_screenshot(page, "silence-policy-history")


def test_chats_in_hidden_tab_request_nothing(ops: Callable[..., Any], chats: None, live_server: Any) -> None:
    page = ops("en")
    asked: list[str] = []
    address = reverse("admin:chat_sessions_live")
    page.on("request", lambda request: asked.append(request.url) if request.resource_type == "fetch" else None)
    page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.away === true})")
    open_chat_page(page, live_server, "live")
    page.clock.install()
    page.reload()
    sessions.live_store().note_activity([Frame("one-more", "ann", tag="vip")])
    page.clock.run_for(4_000)
    page.wait_for_selector("#live-tags tr:has-text('vip') td:has-text('41')")
    page.evaluate("window.away = true")
    page.clock.run_for(4_000)  # the turn that was under way
    before = len(asked)
    assert before >= 1
    page.clock.run_for(60_000)
    assert len(asked) == before
    sessions.live_store().note_activity([Frame("yet-another", "ann", tag="vip")])
    page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector("#live-tags tr:has-text('vip') td:has-text('42')")
    assert all(urlsplit(each).path == address for each in asked)


def test_chat_pages_fit_and_load_nothing_external(ops: Callable[..., Any], chats: None, live_server: Any) -> None:
    """Wide and narrow, light and dark, both languages: nothing is wider than its screen, and nothing comes from
    elsewhere."""
    hour = timedelta(hours=1)
    sale = Campaign.objects.create(
        key="double-11", threshold=timedelta(seconds=90), starts_at=now() - hour, ends_at=now() + 7 * hour
    )
    Campaign.objects.create(key="christmas", starts_at=now() + 20 * hour, ends_at=now() + 90 * hour)
    vip = SilencePolicy.objects.get(tag="vip")
    pages: list[tuple[str, tuple[Any, ...]]] = [
        ("live", ()), ("silencepolicy_changelist", ()), ("silencepolicy_change", (vip.pk,)),
        ("campaign_changelist", ()), ("campaign_change", (sale.pk,)),
    ]  # fmt: skip
    kept = {"live": "live-chats", "silencepolicy_changelist": "silence-policies"}
    for look_of_it, language, scheme, width in (
        ("", "zh-hans", "light", 1400), ("-dark-en", "en", "dark", 1400), ("-narrow", "zh-hans", "light", 390),
    ):  # fmt: skip
        page = ops(language, scheme, width)
        for name, args in pages:
            open_chat_page(page, live_server, name, *args)
            page.wait_for_load_state("load")
            overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert overflow <= 0, (name, look_of_it, overflow)
            hosts = page.evaluate("performance.getEntriesByType('resource').map(each => new URL(each.name).host)")
            assert set(hosts) <= {urlsplit(live_server.url).netloc}
            if name in kept and bool(look_of_it) == (name == "live"):
                save_screenshot(page, f"{kept[name]}{look_of_it}")
