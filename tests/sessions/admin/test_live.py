"""The overview of live chats: content, rights, and text during outages."""

import html
import json
import re
from datetime import timedelta

import pytest
from django.utils.timezone import now

from config.local.processes import select_port
from sessions.models import Campaign, SilencePolicy
from sessions.policy import Policy
from sessions.store import sessions, stats
from tests.sessions import stopped_clock
from tests.sessions.admin.conftest import text, url
from tests.sessions.conftest import count_nudges

pytestmark = pytest.mark.django_db
stopped_chats = stopped_clock.chats


def figures(page):
    found = re.findall(r'class="[^"]*at-figure[^"]*">\s*([^<]+?)\s*<b>([^<]*)</b>', page)
    return dict(found)


def rows(page):
    table = page.partition('id="live-policies"')[2].partition("</table>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
    return [[re.sub("<[^>]+>", "", cell) for cell in row] for row in cells if row]


def test_live_page_counts_chats_silences_and_messages_and_names_the_campaign(editor, chats):
    chats.policies(vip=Policy(timedelta(minutes=60)))
    for number in range(3):
        chats.user(f"v{number}", tag="vip")
    chats.agent("v2", kind="transfer")
    chats.user("s1")
    chats.pass_time(62)
    report, claims = stats.WatcherReport(), chats.claim()
    report.count(claims, claims[0].deadline_ms + 40)
    report.count(claims * 119, 0)
    stats.send_report(chats.store, report, waits=False)
    for tag, sent, answered, false in (("vip", 200, 50, 3), ("default", 1_000, 250, 17)):
        for days_ago in (1, 7):
            count_nudges(chats.store, tag, days_ago, sent=sent, answered=answered, false=false)
    hour = timedelta(hours=1)
    Campaign.objects.create(key="double-11", starts_at=now() - hour, ends_at=now() + hour)
    Campaign.objects.create(key="christmas", starts_at=now() + hour, ends_at=now() + 2 * hour)
    page = text(editor.get(url("silencepolicy_live")))
    assert ("double-11" in page, "christmas" in page) == (True, False)
    assert figures(page) == {
        "Live chats": "4", "Timer running": "3", "Timer paused": "1", "A second, last minute": "2.0",
        "Watchers are behind by": "0 ms", "Claimed, event being recorded": "1", "Not yet delivered": "0",
        "Guide messages sent": "1,200", "Answered within 10 minutes": "300 · 25.0 %",
        "False guide messages": "20 · 1.7 %",
    }  # fmt: skip
    assert rows(page) == [
        ["vip", "2", "1", "200", "50 · 25.0 %", "3 · 1.5 %"],
        ["default", "1", "0", "1,000", "250 · 25.0 %", "17 · 1.7 %"],
    ]
    assert "No watcher" not in page
    assert "data-live-again" in page


def test_live_page_reports_late_or_missing_watchers(editor, chats):
    chats.user()
    chats.pass_time(75)
    sessions.live_store().clock_offset = chats.store.clock_offset
    try:
        page = text(editor.get(url("silencepolicy_live")))
    finally:
        sessions.live_store().clock_offset = 0
    assert re.search(r'at-figure bad">\s*Watchers are behind by<b>[1-9]\d seconds', page), figures(page)
    assert "No watcher has reported" in page


def test_live_page_without_store_shows_a_note(editor, settings):
    settings.REDIS_URL = f"redis://127.0.0.1:{select_port()}/0"
    try:
        page = text(editor.get(url("silencepolicy_live")))
    finally:
        sessions._store_of_url.cache_clear()
    assert "cannot be reached" in page
    assert (figures(page)["Live chats"], rows(page)) == ("–", [])


def test_live_page_draws_pauses_with_threshold(editor, stopped_chats):
    SilencePolicy.objects.update_or_create(key="default", defaults={"threshold": timedelta(seconds=45)})
    for seconds in (3, 21, 100, 3_000):
        stopped_chats.user()
        stopped_chats.pass_time(seconds)
    stopped_chats.user()
    page = text(editor.get(url("silencepolicy_live")))
    chart = page.partition('id="chart-pauses-default"')[2].partition("</section>")[0]
    assert "2 · 50.0 %" in chart
    (drawn,) = re.findall(r'data-value="([^"]*)"', chart)
    data = json.loads(html.unescape(drawn))
    shorter, longer = ({at for at, count in zip(data["labels"], each["data"], strict=True) if count}
                       for each in data["datasets"])  # fmt: skip
    assert (shorter, longer) == ({"2–5 s", "20–30 s"}, {"90–120 s", "> 1800 s"})
    assert "Threshold: 45 seconds" in chart
