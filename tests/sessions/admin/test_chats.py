"""The list of live chats, and one chat with its timeline."""

import re
from datetime import timedelta
from html import unescape

import pytest

from config.local.processes import select_port
from scheduling.models import Touch
from scheduling.planning.ingest import record_events
from sessions.detection.silence_events import silence_event
from sessions.policy import AGENT, CUSTOMER, Policy
from sessions.store import sessions, stats
from sessions.store.client import StoreUnavailable
from sessions.store.inbox import Post
from tests.sessions.admin.conftest import text, url

pytestmark = pytest.mark.django_db
MINUTE = timedelta(minutes=1)


def chat_url(session):
    return f"{url('silencepolicy_chat')}?session={session}"


def test_list_shows_each_live_chat_with_its_reason(editor, chats):
    chats.policies(vip=Policy(3 * MINUTE, tags=("vip", "new")), sla=Policy(MINUTE, after=CUSTOMER))
    chats.user("armed-chat", tags=("new", "vip"))
    chats.user("waiting-chat", tag="sla")
    chats.user("paused-chat")
    chats.agent("paused-chat", kind="transfer")
    page = text(editor.get(url("silencepolicy_chats")))
    # The one that ends first comes first.
    assert page.index("waiting-chat") < page.index("armed-chat") < page.index("paused-chat")
    assert "the chat is being transferred" in page
    assert "new, vip" in page
    chats.store.close("armed-chat", "ann")
    assert "armed-chat" not in text(editor.get(url("silencepolicy_chats")))
    found = text(editor.get(url("silencepolicy_chats"), {"q": "armed-chat"}))
    assert "the chat is closed" in found
    assert "There is no such chat." in text(editor.get(url("silencepolicy_chats"), {"q": "unknown"}))


def test_chat_pages_name_a_missing_watcher(editor, chats):
    pages = url("silencepolicy_chats"), chat_url("s1")
    assert all("No watcher has reported" in text(editor.get(page)) for page in pages)
    stats.send_report(chats.store, stats.WatcherReport(), waits=False)
    assert not any("No watcher has reported" in text(editor.get(page)) for page in pages)


def test_chat_pages_without_answer_about_watchers_show_chats(editor, chats, monkeypatch):
    """In a cluster the reports lie on one node, and chats on all."""

    def fail(_):
        raise StoreUnavailable("the node is away")

    chats.user("s1")
    monkeypatch.setattr(stats, "running_watchers", fail)
    for page in (url("silencepolicy_chats"), chat_url("s1")):
        shown = text(editor.get(page))
        assert "the timer runs" in shown
        assert "No watcher has reported" not in shown
        assert "The live sessions cannot be reached." not in shown


def test_chat_page_explains_policy_and_shows_timeline(editor, chats, matrix):
    matrix.node("guide", "session.silent", delay=timedelta(0))
    chats.policies(vip=Policy(MINUTE, tags=("vip",), after=AGENT, version=4))
    chats.user("s 1", tag="vip")
    sessions.live_store().put_messages(
        [Post("s 1", f"m-{each}", each, "a secret text") for each in ("user", "bot", "system")]
    )
    page = text(editor.get(chat_url("s 1")))
    assert "the customer wrote last" in page
    assert "because of vip" in page
    assert "the one with the shortest threshold" in page
    chats.agent("s 1")
    chats.pass_time(61)
    (claim,) = chats.claim()
    record_events([silence_event(claim, claim.deadline_ms)])
    page = text(editor.get(chat_url("s 1")))
    for said in ("Silence, message 1", "vip v4", "Message: customer", "Message: bot", "Guide message", "guide"):
        assert said in page, said
    assert "a secret text" not in page
    assert Touch.objects.count() == 1
    assert page.count("Guide message") == 1
    # A session whose id starts the same is another one.
    assert "Nothing is recorded." in text(editor.get(chat_url("s")))


def test_timeline_of_ended_chat_has_its_silences(editor, chats, matrix):
    """A close drops the owner of a session, and a day later the session is gone. The page found no silence then."""
    matrix.node("guide", "session.silent", delay=timedelta(0))
    chats.user("s 1")
    chats.store.put_messages([Post("s 1", "m-1", "user", "hello", user_id="ann")])
    chats.pass_time(61)
    record_events([silence_event(each, each.deadline_ms) for each in chats.claim()])
    (link,) = re.findall(r'href="([^"]*/chat/[^"]*)"', text(editor.get(url("silencepolicy_silences"))))
    chats.store.close("s 1", "ann")
    assert "Silence, message 1" in text(editor.get(chat_url("s 1")))
    chats.store.server.client.flushdb()
    page = text(editor.get(unescape(link)))
    assert "There is no such chat." in page
    assert "Silence, message 1" in page
    chats.user("s 1", user_id="bob")
    assert "Silence, message 1" in text(editor.get(unescape(link))), "the id is another user's now"
    assert "Silence, message 1" not in text(editor.get(chat_url("s 1")))


def test_list_selects_chats_and_finds_one_without_a_timer(editor, chats):
    chats.policies(default=Policy(MINUTE, after=AGENT), vip=Policy(MINUTE, tags=("vip",)))
    chats.user("idle-chat", user_id="bob")
    chats.user("vip-chat", tag="vip")
    chats.user("paused-chat", tag="vip", user_id="cid")
    chats.agent("paused-chat", kind="tool", user_id="cid")
    for asked, shown in (
        ({"tag": "vip"}, {"vip-chat", "paused-chat"}), ({"state": "paused"}, {"paused-chat"}),
        ({"user": "bob"}, {"idle-chat"}), ({"user": "bob", "tag": "vip"}, set()),
        ({"tag": "vip", "state": "armed"}, {"vip-chat"}),
    ):  # fmt: skip
        page = text(editor.get(url("silencepolicy_chats"), asked))
        assert {each for each in ("idle-chat", "vip-chat", "paused-chat") if each in page} == shown, asked
    assert "the customer wrote last" in text(editor.get(url("silencepolicy_chats"), {"user": "bob"}))


def test_list_shows_chats_without_a_timer_among_many_armed(editor, chats, monkeypatch):
    monkeypatch.setattr("sessions.admin.chats.MOST_READ", 4)
    chats.policies(default=Policy(MINUTE, after=AGENT), vip=Policy(MINUTE, tags=("vip",)))
    for number in range(6):
        chats.user(f"armed-{number}", tag="vip", user_id=f"u{number}")
    chats.user("first-idle", user_id="bob")
    chats.pass_time(1)
    chats.user("second-idle", user_id="cid")
    page = text(editor.get(url("silencepolicy_chats")))
    assert page.index("armed-5") < page.index("second-idle") < page.index("first-idle")
    assert page.count("the customer wrote last; the timer runs after a message of an agent") == 2
    page = text(editor.get(url("silencepolicy_chats"), {"state": "idle"}))
    assert "first-idle" in page
    assert "armed-" not in page


def test_silences_show_both_kinds_with_outcomes(editor, chats, matrix):
    matrix.node("guide", "session.silent", delay=timedelta(0))
    chats.policies(sla=Policy(MINUTE, after=CUSTOMER))
    chats.user("s 1")
    chats.user("s 2", tag="sla", user_id="bob")
    chats.pass_time(61)
    record_events([silence_event(each, each.deadline_ms) for each in chats.claim()])
    Touch.objects.update(state="suppressed", reason="answered", lease_until=None)
    page = text(editor.get(url("silencepolicy_silences")))
    for said in ("Silence, message 1", "No answer, step 1", "s 1", "s 2", "sla v1", "Suppressed", "guide"):
        assert said in page, said
    page = text(editor.get(url("silencepolicy_silences"), {"tag": "sla"}))
    assert "s 2" in page
    assert "Silence, message 1" not in page
    assert "Nothing is recorded." in text(editor.get(url("silencepolicy_silences"), {"user": "cid"}))


def test_chat_pages_without_redis_show_a_note(editor, settings):
    settings.REDIS_URL = f"redis://127.0.0.1:{select_port()}/0"
    try:
        for page in (url("silencepolicy_chats"), chat_url("s1")):
            assert "The live sessions cannot be reached." in text(editor.get(page))
    finally:
        sessions._store_of_url.cache_clear()
