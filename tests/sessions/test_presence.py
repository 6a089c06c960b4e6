"""Presence blocks from the live store for a touch before it is sent."""

from datetime import timedelta

import pytest
from django.test import override_settings

from config.local.processes import select_port
from scheduling.delivery import presence
from scheduling.delivery.presence import PresenceQuestion
from sessions.detection.presence import SessionPresence
from sessions.store import stats
from sessions.store.client import Server, StoreUnavailable
from sessions.store.sessions import ExpiredKey, Store
from tests.sessions import stopped_clock
from tests.support.tables import each_row

SECOND = timedelta(seconds=1)

chats = stopped_clock.chats


def silence_question(silence, planned_at=None, *, going_out=False):
    event_id = f"{silence.session_id}:{silence.armed_at}"
    return PresenceQuestion(
        silence.user_id, silence.chat_id, "session.silent", event_id, silence.deadline, planned_at, going_out
    )


def event_question(user, event_at):
    return PresenceQuestion(user, "", "material.downloaded", "e1", event_at)


@pytest.fixture
def live(chats):
    return SessionPresence(chats.store)


def test_presence_after_user_message_blocks_only_that_silence(chats, live):
    first, second = chats.confirmed_silence("s1"), chats.confirmed_silence("s:2")
    chats.user(session="s:2")
    assert live.presence_blocks([silence_question(first), silence_question(second)]) == ["", "answered"]


def test_old_silence_is_stale_from_the_planned_time(chats, live):
    claim = chats.confirmed_silence()
    questions = [silence_question(claim, at) for at in (None, claim.deadline + timedelta(minutes=30))]
    for seconds, blocks in ((290, ["", ""]), (15, ["stale", ""]), (1485, ["stale", ""]), (320, ["stale"] * 2)):
        chats.pass_time(seconds)
        assert live.presence_blocks(questions) == blocks


def test_note_sending_counts_only_sent_silence(chats, live):
    first, second = chats.confirmed_silence("s1"), chats.confirmed_silence("s2")
    asked = [
        silence_question(first, going_out=True),
        event_question("carl", chats.now),
        silence_question(second, going_out=True),
    ]
    assert live.presence_blocks(asked) == ["", "", ""]
    assert [stats.session_snapshot(chats.store, each).nudges for each in ("s1", "s2")] == [0, 0]
    live.note_sending(asked, [False, True, True])
    assert [stats.session_snapshot(chats.store, each).nudges for each in ("s1", "s2")] == [0, 1]


def test_presence_of_stale_silence_uses_no_nudge(chats, live):
    claim = chats.confirmed_silence()
    planned_at = claim.deadline + timedelta(minutes=1)
    chats.pass_time(365)
    assert live.presence_blocks([silence_question(claim, planned_at, going_out=True)]) == ["stale"]
    assert stats.session_snapshot(chats.store, "s1").nudges == 0
    assert chats.agent().deadline_ms > 0, "the next silence is guided"


def test_only_a_message_of_the_user_is_a_conversation(chats, live):
    chats.agent()
    for kind in ("ping", "typing", "read"):
        chats.user(kind=kind)
        assert live.presence_blocks([event_question("ann", chats.now - 60 * SECOND)]) == [""], kind
    chats.user()
    now = chats.now
    questions = [
        event_question("ann", now - 60 * SECOND),
        event_question("ann", now + 60 * SECOND),
        event_question("bob", now - 60 * SECOND),
    ]
    assert live.presence_blocks(questions) == ["conversation", "", ""]


def test_presence_answers_keep_order_of_questions(chats, live):
    claim = chats.confirmed_silence()
    chats.user(session="s9", user_id="bob")
    then = chats.now - 600 * SECOND
    questions = [
        event_question("bob", then),
        silence_question(claim),
        event_question("carl", then),
        silence_question(claim),
        event_question("bob", then),
    ]
    assert live.presence_blocks(questions) == ["conversation", "", "", "", "conversation"]
    assert live.presence_blocks([]) == []


@each_row("event_id", ["", "abc", "abc:", ":", "s1:-5", "s1:1.5", "s1:٣"])
def test_presence_ignores_foreign_event_id(chats, live, event_id):
    question = PresenceQuestion("ann", "", "session.silent", event_id, chats.now)
    assert live.presence_blocks([question]) == [""]


def test_presence_without_store_is_unknown(settings, chats):
    nowhere = f"redis://127.0.0.1:{select_port()}/0"
    with pytest.raises(StoreUnavailable):
        SessionPresence(Store(Server(nowhere), lambda: chats.plan)).presence_blocks([event_question("ann", chats.now)])
    settings.REDIS_URL = nowhere
    assert presence.presence_blocks([event_question("ann", chats.now)]) == ["presence_unknown"]


def test_presence_without_gateway_blocks_only_its_silences(chats, live):
    """The live sessions' own server answers about all others."""
    own = chats.confirmed_silence()
    chats.store.note_expired([ExpiredKey("bob", "session:bob")], window=30 * SECOND)
    (gateways,) = chats.claim()
    chats.store.confirm([gateways])
    questions = [silence_question(own), silence_question(gateways), event_question("carl", chats.now)]
    with override_settings(AFTERTOUCH_GATEWAY_REDIS_URL=f"redis://127.0.0.1:{select_port()}/0"):
        assert live.presence_blocks(questions) == ["", "presence_unknown", ""]
