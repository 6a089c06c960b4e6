"""What frames do to a session: on the real server, with a clock that only the test moves."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.conf import settings

from scheduling.errors import InvalidInput
from sessions.frames import Frame
from sessions.policy import Override, Policy
from sessions.store import client as keys
from sessions.store import inbox, stats
from sessions.store.client import StoreUnavailable
from sessions.store.inbox import Post
from sessions.store.sessions import (
    COUNTED,
    DROPPED,
    PAUSE_COUNTS,
    REFUSED,
    SESSION_LIFETIME,
    FrameEffect,
)
from tests.sessions import stopped_clock
from tests.sessions.conftest import Chats
from tests.support.tables import each_row

SECOND = timedelta(seconds=1)


chats = stopped_clock.chats


def test_session_is_silent_one_minute_after_last_user_frame(chats):
    noted = chats.user()
    assert noted.outcome == COUNTED
    assert chats.seconds_left(noted) == pytest.approx(60, abs=0.001)
    chats.pass_time(59)
    assert not chats.silent()
    chats.user(kind="ping")
    chats.pass_time(59)
    assert not chats.silent()
    chats.pass_time(1.1)
    assert chats.silent()


# --- whose session it is ----------------------------------------------------------------------------------------------


def test_agent_frame_does_not_set_user(chats):
    chats.agent(user_id="agent-7", chat_id="room")
    assert chats.user(user_id="ann").outcome == COUNTED
    chats.agent(user_id="ann")
    chats.pass_time(61)
    assert [(each.user_id, each.chat_id) for each in chats.claim()] == [("ann", "room")]


@pytest.mark.parametrize("by", ["user", "agent"])
@pytest.mark.parametrize("kind", ["message", "typing", "close"])
def test_frame_of_other_user_is_refused(chats, by, kind):
    noted = chats.user(seq=1)
    chats.pass_time(30)
    speak = chats.user if by == "user" else chats.agent
    assert speak(user_id="eve", kind=kind, seq=9, tag="vip") == FrameEffect(REFUSED, noted.deadline_ms)
    assert chats.user(kind="ping", seq=2).outcome == COUNTED
    chats.pass_time(61)
    assert [(each.user_id, each.tag) for each in chats.claim()] == [("ann", "default")]
    assert chats.store.sessions_of(["eve"]) == [""]


# --- order ------------------------------------------------------------------------------------------------------------


def lose_presence_once(store, monkeypatch):
    """The next frames are counted, and the write of the presence of their users fails."""

    def fail(*_, **__):
        monkeypatch.undo()
        raise StoreUnavailable("killed in between")

    monkeypatch.setattr(store, "store_presence", fail)


def test_repeated_frame_stores_lost_presence(chats, monkeypatch):
    batch = [
        Frame("s1", "ann", seq=1),
        Frame("s1", "ann", kind="typing", seq=2),
        Frame("s2", "bob", kind="ping", seq=1),
    ]
    lose_presence_once(chats.store, monkeypatch)
    with pytest.raises(StoreUnavailable):
        chats.store.note_activity(batch)
    counted_at = chats.now
    assert chats.store.last_frames(["ann", "bob"]) == [None, None]
    chats.pass_time(5)
    assert [each.outcome for each in chats.store.note_activity(batch)] == [DROPPED] * 3
    assert chats.store.last_frames(["ann", "bob"]) == [counted_at, None]
    assert chats.store.sessions_of(["ann", "bob"]) == ["s1", "s2"]


def test_repeat_beside_new_ping_stores_lost_presence(chats, monkeypatch):
    message, ping = Frame("s1", "ann", seq=1), Frame("s2", "ann", kind="ping", seq=1)
    lose_presence_once(chats.store, monkeypatch)
    with pytest.raises(StoreUnavailable):
        chats.store.note_activity([message])
    counted_at = chats.now
    chats.pass_time(5)
    assert [each.outcome for each in chats.store.note_activity([message, ping])] == [DROPPED, COUNTED]
    assert (chats.store.last_frames(["ann"]), chats.store.sessions_of(["ann"])) == ([counted_at], ["s2"])
    chats.user("s2")
    wrote_at = chats.now
    chats.store.note_activity([message, Frame("s2", "ann", kind="ping", seq=2)])
    assert chats.store.last_frames(["ann"]) == [wrote_at]


def test_repeat_after_close_stores_lost_presence(chats, monkeypatch):
    lose_presence_once(chats.store, monkeypatch)
    with pytest.raises(StoreUnavailable):
        chats.user(seq=1)
    counted_at = chats.now
    chats.pass_time(5)
    chats.agent(kind="close")
    assert chats.user(seq=1).outcome == DROPPED
    assert chats.store.last_frames(["ann"]) == [counted_at]


def test_repeated_frame_does_not_replace_newer_presence(chats):
    chats.user("s1", seq=1)
    chats.user("s1", kind="ping", seq=2)
    chats.pass_time(5)
    chats.user("s2", seq=1)
    wrote_at = chats.now
    chats.pass_time(5)
    assert [chats.user("s1", kind, seq=seq).outcome for kind, seq in (("message", 1), ("ping", 2))] == [DROPPED] * 2
    assert chats.store.last_frames(["ann"]) == [wrote_at]
    assert chats.store.sessions_of(["ann"]) == ["s2"]
    chats.pass_time(settings.AFTERTOUCH_CONVERSATION_WINDOW.total_seconds())
    chats.user("s1", seq=1)
    assert chats.store.last_frames(["ann"]) == [None]


def test_repeated_frame_of_other_user_stores_no_presence(chats):
    chats.user(seq=1)
    assert chats.user(user_id="eve", seq=1).outcome == REFUSED
    assert chats.store.sessions_of(["eve"]) == [""]


@pytest.mark.parametrize("by", ["user", "agent"])
def test_new_epoch_restarts_seq(chats, by):
    chats.user()
    speak = chats.user if by == "user" else chats.agent

    def outcomes(*frames):
        return [speak(seq=seq, epoch=epoch).outcome for seq, epoch in frames]

    assert outcomes((9, ""), (1, ""), (1, "b"), (1, "b"), (2, "")) == [COUNTED, DROPPED, COUNTED, DROPPED, COUNTED]
    assert outcomes((1, "c"), (10, "b"), (2, "c"), (3, "c")) == [COUNTED, DROPPED, COUNTED, COUNTED]
    assert outcomes(*((1, f"e{number}") for number in range(9))) == [COUNTED] * 9
    assert outcomes((99, "e8"), (100, "e7"), (100, "e6"), (100, "e5")) == [COUNTED, DROPPED, DROPPED, DROPPED]
    chats.user(kind="close")
    chats.user()
    assert outcomes((98, "e8"), (101, "e7"), (100, "e8")) == [DROPPED, DROPPED, COUNTED]


def test_forgotten_epoch_counts_again(chats):
    """The store remembers four epochs of a side."""
    assert [chats.user(seq=1, epoch=f"e{number}").outcome for number in range(5)] == [COUNTED] * 5
    assert chats.user(seq=9, epoch="e1").outcome == DROPPED
    assert chats.user(seq=1, epoch="e0").outcome == COUNTED


def test_frames_of_batch_count_in_order(chats):
    """Several of one session, and of both sides, go to one script."""
    frames = [
        Frame("s1", "ann", seq=1),
        Frame("s2", "bob", seq=1),
        Frame("s1", "ann", sender="agent", seq=1),
        Frame("s1", "ann", kind="close", seq=3),
        Frame("s1", "ann", kind="ping", seq=2),
    ]
    outcomes = [each.outcome for each in chats.store.note_activity(frames)]
    assert outcomes == [COUNTED, COUNTED, COUNTED, COUNTED, DROPPED]
    chats.pass_time(70)
    assert [each.session_id for each in chats.claim()] == ["s2"]


# --- close ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["user", "agent"])
def test_close_keeps_seq_of_both_sides(chats, by):
    chats.user(seq=5)
    chats.agent(seq=7)
    (chats.user if by == "user" else chats.agent)(kind="close", seq=8)
    assert (chats.user(seq=5).outcome, chats.agent(seq=7).outcome) == (DROPPED, DROPPED)
    assert (chats.user(seq=9).outcome, chats.agent(seq=7).outcome) == (COUNTED, DROPPED)
    assert chats.agent(seq=9).outcome == COUNTED


# --- claims -----------------------------------------------------------------------------------------------------------


def test_claim_contains_session_user_chat_and_deadline(chats):
    chats.user(session="odd id \u2603 {x}", chat_id="room 7", tag="vip", user_id="änn")
    noted = chats.user(session="odd id \u2603 {x}", kind="ping", user_id="änn")
    chats.pass_time(61)
    (claim,) = chats.claim()
    assert (claim.session_id, claim.user_id, claim.chat_id, claim.tag) == ("odd id \u2603 {x}", "änn", "room 7", "vip")
    assert (claim.deadline_ms, claim.nudge) == (noted.deadline_ms, 1)
    assert claim.deadline_ms - claim.armed_at // 1000 == 60_000


def test_claim_returns_oldest_silences_up_to_limit(chats):
    for number in range(40):
        chats.user(session=f"s{number}")
        chats.pass_time(0.01)
    chats.pass_time(120)
    seen = []
    for _ in range(41):  # one claim at least in each pass, and none in the last
        claims = chats.claim(limit=1)
        assert len(claims) <= keys.SHARDS
        seen += claims
    assert claims == []
    assert len(seen) == 40
    for shard in range(keys.SHARDS):
        own = [each.deadline_ms for each in seen if keys.shard_of(each.session_id) == shard]
        assert own == sorted(own)


def test_claim_returns_seconds_to_next_deadline(chats):
    assert chats.store.claim_silent(10, SECOND).seconds_to_next == float("inf")
    chats.user()
    assert chats.store.claim_silent(10, SECOND).seconds_to_next == pytest.approx(60, abs=0.001)
    chats.pass_time(61)
    assert chats.store.claim_silent(10, 5 * SECOND).seconds_to_next == pytest.approx(5, abs=0.001)


def test_clock_moved_back_keeps_deadlines_and_unique_armings(chats):
    before = chats.claimed_silence()
    chats.pass_time(-40)
    chats.user()
    chats.pass_time(35)
    assert chats.claim() == []
    chats.pass_time(26)
    (after,) = chats.claim()
    assert after.armed_at > before.armed_at
    assert after.deadline_ms - before.deadline_ms == pytest.approx(21_000, abs=500)


def test_old_lease_after_clock_moved_back_is_ignored(chats):
    chats.user()
    chats.pass_time(61)
    assert len(chats.claim(lease=5 * SECOND)) == 1
    chats.pass_time(-2)
    chats.user()
    chats.pass_time(8)
    assert chats.claim() == []
    chats.pass_time(53)
    assert len(chats.claim()) == 1


# --- several guide messages ---------------------------------------------------------------------------------------


def confirmed(chats):
    """How many nudges go out now."""
    claims = chats.claim()
    confirmed = chats.store.confirm(claims)
    for each in claims:
        chats.deliver(each)
    return confirmed


@pytest.mark.parametrize("kind", ["message", "typing", "tool", "resume"])
def test_agent_frame_before_message_keeps_nudge(chats, kind):
    claim = chats.confirmed_silence()
    noted = chats.agent(kind=kind)
    assert not chats.is_current(claim)
    if kind == "tool":
        noted = chats.agent()
    assert chats.seconds_left(noted) == pytest.approx(180 if kind == "typing" else 60, abs=0.001)
    chats.pass_time(181)
    assert [each.nudge for each in chats.claim()] == [1]


def test_agent_message_after_nudges_keeps_remaining_ones(chats):
    chats.policies(default=Policy(60 * SECOND, max_nudges=3, growth=2))
    chats.user()
    chats.pass_time(61)
    assert confirmed(chats) == 1
    chats.pass_time(121)
    (second,) = chats.claim()
    chats.store.confirm([second])
    assert chats.seconds_left(chats.agent()) == pytest.approx(120, abs=0.001)
    for _ in range(2):
        chats.pass_time(241)
        assert confirmed(chats) == 1
    assert chats.agent().deadline_ms == 0


def count_nudges(chats):
    return stats.session_snapshot(chats.store, "s1").nudges


def test_note_sending_counts_sent_message_once(chats):
    chats.policies(default=Policy(60 * SECOND, max_nudges=2))
    claim = chats.confirmed_silence()
    later = chats.now + 60 * SECOND
    for send_until, sent in ((None, False), (chats.now - SECOND, False), (later, False), (later, True), (later, True)):
        assert chats.is_current(claim, send_until=send_until)
        chats.note_sending(claim, sent=sent)
        assert count_nudges(chats) == sent


def test_note_sending_counts_late_repeat_once(chats):
    chats.policies(default=Policy(60 * SECOND, max_nudges=2, growth=1))
    chats.user()
    claims = []
    for _ in range(2):
        chats.store.confirm(claims)
        chats.pass_time(61)
        (claim,) = chats.claim()
        chats.deliver(claim)
        claims.append(claim)
    for claim in (*claims, *reversed(claims)):
        chats.deliver(claim)
        assert count_nudges(chats) == 2


@pytest.mark.parametrize("send_until", [None, datetime.min.replace(tzinfo=UTC)])
def test_still_silent_without_sending_reserves_nothing(chats, send_until):
    claim = chats.confirmed_silence()
    assert chats.is_current(claim, send_until=send_until)
    assert chats.agent().deadline_ms > 0


def test_missing_note_sending_keeps_limit_until_user_writes(chats):
    """A worker was killed, or Redis was unavailable: the message may have been sent, so there is no second one."""
    claim = chats.confirmed_silence()
    assert chats.is_current(claim)
    for _ in range(2):
        assert chats.agent().deadline_ms == 0
    assert count_nudges(chats) == 0, "what nobody knows is not shown"
    assert chats.user().deadline_ms > 0


def test_missing_note_sending_of_one_message_keeps_limit(chats):
    chats.policies(default=Policy(60 * SECOND, max_nudges=2, growth=1))
    lost = chats.confirmed_silence()
    assert chats.is_current(lost)
    chats.pass_time(61)
    (claim,) = chats.claim()
    chats.store.confirm([claim])
    chats.deliver(claim)
    assert count_nudges(chats) == 1
    assert chats.agent().deadline_ms == 0


def test_note_sending_after_agent_message_counts(chats):
    """The agent answers between the last look and the mark. The message is on its way."""
    claim = chats.confirmed_silence()
    assert chats.is_current(claim)
    assert chats.agent().deadline_ms == 0
    chats.note_sending(claim)
    assert count_nudges(chats) == 1
    assert chats.agent().deadline_ms == 0


def test_note_sending_of_stop_releases_only_its_silence(chats):
    chats.policies(default=Policy(60 * SECOND, max_nudges=2, growth=1))
    first = chats.confirmed_silence()
    chats.pass_time(61)
    (second,) = chats.claim()
    for claim in (first, second):
        assert chats.is_current(claim)
    chats.note_sending(first, sent=False)
    assert count_nudges(chats) == 0
    chats.note_sending(second)
    assert count_nudges(chats) == 1
    chats.note_sending(second, sent=False)  # a stop of its retry, or a late worker
    assert count_nudges(chats) == 1


def test_note_sending_before_confirm_uses_nudge(chats):
    """The watcher was killed after it recorded the silence. The agent's word must not bring a second message."""
    claim = chats.claimed_silence()
    chats.deliver(claim)
    assert chats.agent().deadline_ms == 0
    chats.pass_time(3600)
    assert chats.claim() == []


def test_note_sending_of_closed_session_is_ignored(chats):
    claim = chats.confirmed_silence()
    assert chats.is_current(claim)
    chats.user(kind="close")
    chats.note_sending(claim)
    assert count_nudges(chats) == 0
    chats.store.server.client.flushall()
    chats.note_sending(claim)
    assert chats.store.known(["s1"]) == [False]


def test_unknown_session_counts_as_silent(chats):
    chats.user()
    chats.pass_time(61)
    claims = chats.claim()
    chats.store.server.client.flushall()
    assert chats.is_current(claims[0])
    chats.user(kind="ping")
    assert not chats.is_current(claims[0])


# --- policies ---------------------------------------------------------------------------------------------------------


def test_campaign_overrides_threshold_while_it_runs(chats):
    begins = chats.now + 10 * SECOND
    sale = Override(begins, begins + 100 * SECOND, 90 * SECOND)
    later = Override(begins + 50 * SECOND, begins + 60 * SECOND, 20 * SECOND)
    chats.policies(campaigns=[later, sale], vip=Policy(180 * SECOND))
    for wait, seconds in ((0, 180), (15, 90), (50, 20), (10, 90), (50, 180)):
        chats.pass_time(wait)
        assert chats.seconds_left(chats.user(tag="vip")) == pytest.approx(seconds, abs=0.001)


def test_jitter_is_spread_evenly(chats):
    chats.policies(default=Policy(60 * SECOND, jitter=5 * SECOND))
    frames = [Frame(f"s{number}", "ann") for number in range(2000)]
    now = chats.now.timestamp()
    left = [each.deadline_ms / 1000 - now for each in chats.store.note_activity(frames)]
    assert min(left) >= 60
    assert max(left) <= 65.5
    tenths = [sum(60 + 0.5 * tenth <= each < 60.5 + 0.5 * tenth for each in left) for tenth in range(10)]
    assert min(tenths) > 100


# --- what the server may do -------------------------------------------------------------------------------------------


def test_claim_and_confirm_restore_lost_policies(chats):
    """If all clients are silent, no frame brings them."""
    chats.user()
    chats.pass_time(61)
    chats.store.server.client.delete(*keys.POLICIES)
    claims = chats.claim()
    assert len(claims) == 1
    chats.store.server.client.delete(*keys.POLICIES)
    assert chats.store.confirm(claims) == 1


def test_round_instants_are_stored_as_integers(chats):
    """Lua writes 1800000000000000 as 1.8e+15 where it is let."""
    chats.user()
    client, key = chats.store.server.client, keys.SESSION[keys.shard_of("s1")] + "s1"
    client.hset(key, "a", 1_799_999_999_999_999)
    chats.store.clock_offset -= 10**14  # behind that instant, so that the next arming is the one after it
    chats.user()
    assert client.hget(key, "a") == b"1800000000000000"
    chats.pass_time(61)
    (claim,) = chats.claim()
    assert claim.armed_at == 1_800_000_000_000_000
    assert chats.is_current(claim)
    assert chats.store.confirm([claim]) == 1


def test_sessions_expire_and_leave_the_index(chats):
    chats.user()
    chats.user(session="s2", user_id="bob")
    chats.store.close("s3", "carl")
    client = chats.store.server.client
    for session, hours in (("s1", 24), ("s2", 24), ("s3", 1)):
        left = client.pttl(keys.SESSION[keys.shard_of(session)] + session)
        assert left == pytest.approx(hours * 3_600_000, rel=0.01)
    # What vanished leaves the index when its turn comes.
    client.delete(keys.SESSION[keys.shard_of("s1")] + "s1")
    chats.pass_time(61)
    assert [each.session_id for each in chats.claim()] == ["s2"]
    assert client.zcard(keys.DUE[keys.shard_of("s1")]) == 0


# --- people -----------------------------------------------------------------------------------------------------------


def test_presence_returns_last_session_and_time_of_user(chats):
    before = chats.now
    chats.user(session="s1")
    chats.user(session="s2")
    chats.agent(session="s3", user_id="bob")
    assert chats.store.sessions_of(["ann", "bob"]) == ["s2", ""]
    heard = chats.store.last_frames(["ann", "bob", "dora"])
    assert heard[1:] == [None, None]
    assert heard[0] is not None
    assert before - SECOND <= heard[0] <= chats.now + SECOND


@pytest.mark.parametrize("kind", ["ping", "typing", "read"])
def test_last_frames_counts_only_messages(chats, kind):
    chats.user(kind=kind)
    assert (chats.store.sessions_of(["ann"]), chats.store.last_frames(["ann"])) == (["s1"], [None])
    chats.user()
    wrote_at = chats.now
    chats.pass_time(10)
    chats.user(kind=kind)
    assert chats.store.last_frames(["ann"]) == [wrote_at.replace(microsecond=wrote_at.microsecond // 1000 * 1000)]


def test_last_frames_ends_with_window_though_pings_continue(chats):
    window = settings.AFTERTOUCH_CONVERSATION_WINDOW.total_seconds()
    chats.user()
    chats.pass_time(window - 1)
    chats.user(kind="ping")
    assert chats.store.last_frames(["ann"]) != [None]
    chats.pass_time(2)
    assert (chats.store.sessions_of(["ann"]), chats.store.last_frames(["ann"])) == (["s1"], [None])


def test_presence_lasts_as_long_as_the_session(chats):
    """Also while closed hours make the timer longer than a session is kept otherwise."""
    opens_at = chats.now + timedelta(hours=60)
    names = [keys.PRESENCE[keys.shard_of("ann")] + "ann", keys.SESSION[keys.shard_of("s1")] + "s1"]
    chats.user()
    for seconds in (0, 60 * 3600):
        presence, session = (chats.store.server.client.pttl(name) / 1000 for name in names)
        assert session == pytest.approx(seconds + 24 * 3600, abs=90)
        assert session - 90 < presence < session + 3690
        chats.policies(default=Policy(timedelta(seconds=60), hours=[(opens_at, opens_at + timedelta(hours=8))]))
        chats.user(kind="ping")


def test_inapp_finds_sessions_within_window_only(chats):
    """A page that is open sends pings."""
    chats.user()
    assert chats.store.sessions_of(["ann", "bob"], within=timedelta(minutes=10)) == ["s1", ""]
    name = keys.PRESENCE[keys.shard_of("ann")] + "ann"
    chats.store.server.client.pexpire(name, SESSION_LIFETIME - timedelta(minutes=11))
    assert chats.store.sessions_of(["ann"], within=timedelta(minutes=10)) == [""]
    assert chats.store.sessions_of(["ann"]) == ["s1"]
    chats.user(kind="ping")
    assert chats.store.sessions_of(["ann"], within=timedelta(minutes=10)) == ["s1"]


def test_presence_value_stays_below_44_bytes(chats):
    """The server stores longer texts apart, 40 bytes more for each user."""
    chats.user(session="0" * 36)
    (value,) = chats.store.server.client.mget([keys.PRESENCE[keys.shard_of("ann")] + "ann"])
    assert len(value) <= 44


def test_active_user_is_noted_once_an_hour(chats):
    def waiting():
        return [user for users in chats.store.active_users(100).values() for user in users]

    chats.agent()
    assert waiting() == []
    chats.user(kind="ping")
    assert waiting() == ["ann"]
    chats.store.clear_active(chats.store.active_users(100))
    chats.pass_time(3500)
    chats.user()
    assert waiting() == []
    chats.pass_time(101)
    chats.user()
    assert waiting() == ["ann"]


# --- inboxes ----------------------------------------------------------------------------------------------------------


def test_inbox_keeps_messages_that_fill_the_byte_limit(server):
    box, empty = Chats(server).store, len(Post("s1", "a", "user", "").body())
    half = "x" * (inbox.MOST_BYTES // 2 - empty)

    def put(id, text):
        box.put_messages([Post("s1", id, "user", text)])
        return [json.loads(each.body)["id"] for each in box.messages_since("s1", inbox.START)]

    assert [put("a", half), put("b", half), put("c", half + "x")] == [["a"], ["a", "b"], ["c"]]


def test_inbox_keeps_last_messages_within_byte_limit(server):
    box = Chats(server).store
    for number in range(40):
        box.put_messages([Post("s1", f"m{number}", "user", "x" * 15_000)])
    for number in range(60):
        box.put_messages([Post("s1", f"short{number}", "user", "x" * 1_000)])
    kept = box.messages_since("s1", inbox.START)
    assert sum(len(each.body) for each in kept) <= 2 * inbox.MOST_BYTES
    names = [json.loads(each.body)["id"] for each in kept]
    assert names[-60:] == [f"short{number}" for number in range(60)]
    assert names[:-60] == [f"m{number}" for number in range(40 - len(names[:-60]), 40)]
    assert len(names) > 60
    box.put_messages([Post("s1", "huge", "user", "x" * (inbox.MOST_BYTES + 1))])
    assert [json.loads(each.body)["id"] for each in box.messages_since("s1", inbox.START)] == ["huge"]


# --- validation of input --------------------------------------------------------------------------------------------


@each_row(
    "frame, field",
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"session_id": "a\x00b"}, "session_id"),
        ({"session_id": "a\ud800"}, "session_id"),
        ({"session_id": 7}, "session_id"),
        ({"user_id": ""}, "user_id"),
        ({"user_id": "x" * 201}, "user_id"),
        ({"chat_id": "\n"}, "chat_id"),
        ({"sender": "robot"}, "from"),
        ({"kind": "tool"}, "kind"),
        ({"kind": "dance"}, "kind"),
        ({"seq": -1}, "seq"),
        ({"seq": 1.5}, "seq"),
        ({"seq": True}, "seq"),
        ({"seq": 2**53}, "seq"),
        ({"tag": "x" * 65}, "tag"),
        ({"epoch": "x" * 65}, "epoch"),
        ({"epoch": "a\n"}, "epoch"),
        ({"tags": "vip"}, "tags"),
        ({"tags": ["a"] * 9}, "tags"),
        ({"tags": ["x" * 65]}, "tags.0"),
        ({"tags": ["a", ""]}, "tags.1"),
        ({"tags": ["a\nb"]}, "tags.0"),
    ],
)
def test_invalid_frame_names_field(frame, field):
    with pytest.raises(InvalidInput) as refused:
        Frame(**{"session_id": "s1", "user_id": "ann", **frame})
    assert [error.field for error in refused.value.errors] == [field]


# --- claims of others ---


def test_confirm_and_release_of_old_arming_keep_next_claim(chats):
    """A watcher that was stopped comes back when another one has claimed the session's next silence."""
    chats.user()
    chats.pass_time(61)
    late = chats.claim()
    now_claimed = chats.claimed_silence()
    assert (chats.store.confirm(late), chats.store.release(late)) == (0, 0)
    assert chats.claim() == [], "it is still in flight"
    assert chats.store.confirm([now_claimed]) == 1


def act_before(script, chats, act, monkeypatch):
    """Another process acts right before this script, once."""
    run = chats.store.server.run

    def act_first(calls, *args, **more):
        if calls[0][0] == script:
            monkeypatch.undo()
            act()
        return run(calls, *args, **more)

    monkeypatch.setattr(chats.store.server, "run", act_first)


def test_claim_silent_skips_session_claimed_after_peek(chats, monkeypatch):
    chats.user()
    chats.pass_time(61)
    first = []
    act_before("claim_silent", chats, lambda: first.extend(chats.claim()), monkeypatch)
    assert chats.claim() == []
    assert chats.store.confirm(first) == 1


def test_claim_silent_drops_old_lease_of_armed_session(chats):
    """Its clock was behind when it was armed again, so the lease stayed."""
    noted = chats.user()
    shard = keys.shard_of("s1")
    chats.store.server.client.zadd(keys.INFLIGHT[shard], {"s1": noted.deadline_ms - 61_000})
    assert chats.claim() == []
    (found,) = [each for each in chats.store.shards() if each.armed]
    assert (found.armed, found.in_flight) == (1, 0)


def test_pause_that_is_renewed_before_its_removal_counts(chats, monkeypatch):
    chats.user()
    chats.agent(kind="tool")
    chats.pass_time(PAUSE_COUNTS.total_seconds() + 1)
    act_before("delete_pauses", chats, lambda: chats.agent(kind="tool"), monkeypatch)
    assert sum(each.paused for each in chats.store.shards()) == 1
