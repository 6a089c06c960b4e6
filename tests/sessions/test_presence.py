"""What the live store says against a touch that is about to go out."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.test import override_settings

from config.local.processes import select_port
from scheduling.delivery import presence
from scheduling.delivery.presence import PresenceQuestion
from sessions.detection.presence import SessionPresence, parse_event_id
from sessions.store import stats
from sessions.store.client import Server, StoreUnavailable
from sessions.store.sessions import ClaimedSilence, Store
from tests.sessions.conftest import Chats

SECOND = timedelta(seconds=1)


def about(silence: ClaimedSilence, planned_at: datetime | None = None, *, going_out: bool = False) -> PresenceQuestion:
    event_id = f"{silence.session_id}:{silence.armed_at}"
    return PresenceQuestion(
        silence.user_id, silence.chat_id, "session.silent", event_id, silence.deadline, planned_at, going_out
    )


def other(user: str, event_at: datetime) -> PresenceQuestion:
    return PresenceQuestion(user, "", "material.downloaded", "e1", event_at)


@pytest.fixture
def live(chats: Chats) -> SessionPresence:
    return SessionPresence(chats.store)


def handed_in(chats: Chats, session: str = "s1") -> ClaimedSilence:
    chats.user(session=session)
    chats.pass_time(61)
    (claim,) = chats.claim()
    chats.store.confirm([claim])
    return claim


def test_a_silence_that_stands_meets_no_objection(chats: Chats, live: SessionPresence) -> None:
    assert live.presence_blocks([about(handed_in(chats))]) == [""]


def test_a_word_of_the_user_answers_that_silence_and_no_other(chats: Chats, live: SessionPresence) -> None:
    first, second = handed_in(chats, "s1"), handed_in(chats, "s:2")
    chats.user(session="s:2")
    assert live.presence_blocks([about(first), about(second)]) == ["", "answered"]


def test_a_silence_whose_moment_is_long_gone_is_stale(chats: Chats, live: SessionPresence) -> None:
    claim = handed_in(chats)
    chats.pass_time(290)
    assert live.presence_blocks([about(claim)]) == [""]
    chats.pass_time(15)
    assert live.presence_blocks([about(claim)]) == ["stale"]


def test_late_is_counted_from_when_its_node_wanted_it(chats: Chats, live: SessionPresence) -> None:
    claim = handed_in(chats)
    chats.pass_time(1790)
    assert live.presence_blocks([about(claim, claim.deadline + timedelta(minutes=30))]) == [""]
    chats.pass_time(320)
    assert live.presence_blocks([about(claim, claim.deadline + timedelta(minutes=30))]) == ["stale"]


def test_note_sending_counts_only_a_silence_that_is_sent(chats: Chats, live: SessionPresence) -> None:
    first, second = handed_in(chats, "s1"), handed_in(chats, "s2")
    asked = [about(first, going_out=True), other("carl", chats.now), about(second, going_out=True)]
    assert live.presence_blocks(asked) == ["", "", ""]
    assert [stats.session_snapshot(chats.store, each).nudges for each in ("s1", "s2")] == [0, 0]
    live.note_sending(asked, [False, True, True])
    assert [stats.session_snapshot(chats.store, each).nudges for each in ("s1", "s2")] == [0, 1]


def test_objections_stale_silence_uses_no_nudge(chats: Chats, live: SessionPresence) -> None:
    claim = handed_in(chats)
    planned_at = claim.deadline + timedelta(minutes=1)
    chats.pass_time(365)
    assert live.presence_blocks([about(claim, planned_at, going_out=True)]) == ["stale"]
    assert stats.session_snapshot(chats.store, "s1").nudges == 0
    assert chats.agent().deadline_ms > 0, "the next silence is guided"


@pytest.mark.parametrize("kind", ["ping", "typing", "read"])
def test_objections_page_that_only_pings_is_no_conversation(chats: Chats, live: SessionPresence, kind: str) -> None:
    chats.user(kind=kind)
    assert live.presence_blocks([other("ann", chats.now - 60 * SECOND)]) == [""]


def test_a_user_who_wrote_after_the_event_is_in_conversation(chats: Chats, live: SessionPresence) -> None:
    chats.user()
    now = chats.now
    questions = [other("ann", now - 60 * SECOND), other("ann", now + 60 * SECOND), other("bob", now - 60 * SECOND)]
    assert live.presence_blocks(questions) == ["conversation", "", ""]


def test_what_the_agent_does_is_no_conversation(chats: Chats, live: SessionPresence) -> None:
    chats.agent()
    assert live.presence_blocks([other("ann", chats.now - 60 * SECOND)]) == [""]


def test_a_conversation_is_over_after_its_window(chats: Chats, live: SessionPresence) -> None:
    with override_settings(AFTERTOUCH_CONVERSATION_WINDOW=timedelta(milliseconds=1)):
        chats.user()
        while chats.store.last_frames(["ann"]) != [None]:
            pass
        assert live.presence_blocks([other("ann", chats.now - 60 * SECOND)]) == [""]


def test_answers_come_in_the_order_of_the_questions(chats: Chats, live: SessionPresence) -> None:
    claim = handed_in(chats)
    chats.user(session="s9", user_id="bob")
    then = chats.now - 600 * SECOND
    questions = [other("bob", then), about(claim), other("carl", then), about(claim), other("bob", then)]
    assert live.presence_blocks(questions) == ["conversation", "", "", "", "conversation"]
    assert live.presence_blocks([]) == []


@pytest.mark.parametrize("event_id", ["", "abc", "abc:", ":", "s1:-5", "s1:1.5", "s1:٣"])
def test_an_event_of_somebody_else_names_no_silence_of_ours(chats: Chats, live: SessionPresence, event_id: str) -> None:
    question = PresenceQuestion("ann", "", "session.silent", event_id, chats.now)
    assert live.presence_blocks([question]) == [""]


def test_the_last_colon_divides() -> None:
    assert parse_event_id("a:b:12") == ("a:b", 12)


def test_a_store_that_is_away_is_said_to_be_unknown(settings: Any, chats: Chats) -> None:
    nowhere = f"redis://127.0.0.1:{select_port()}/0"
    with pytest.raises(StoreUnavailable):
        SessionPresence(Store(Server(nowhere), lambda: chats.plan)).presence_blocks([other("ann", chats.now)])
    settings.REDIS_URL = nowhere
    assert presence.presence_blocks([other("ann", chats.now)]) == ["presence_unknown"]


def test_objections_gateway_away_holds_only_its_own_silences(chats: Chats, live: SessionPresence) -> None:
    """The live sessions' own server answers about all others."""
    own = handed_in(chats)
    chats.store.note_expired([("bob", "session:bob")], window=30 * SECOND)
    (gateways,) = chats.claim()
    chats.store.confirm([gateways])
    questions = [about(own), about(gateways), other("carl", chats.now)]
    with override_settings(AFTERTOUCH_GATEWAY_REDIS_URL=f"redis://127.0.0.1:{select_port()}/0"):
        assert live.presence_blocks(questions) == ["", "presence_unknown", ""]
