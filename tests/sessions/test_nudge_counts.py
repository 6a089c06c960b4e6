"""Guide messages that customers answered or did not need: what counts as which."""

from datetime import timedelta

import pytest

from scheduling.models import Node, Touch
from scheduling.planning.ingest import record_events
from sessions.detection.silence_events import silence_event
from sessions.policy import Policy
from sessions.store import stats
from tests.scheduling.core.conftest import deliver
from tests.sessions import stopped_clock
from tests.sessions.conftest import Chats
from tests.support.tables import each_row
from tests.support.waiting import eventually

chats = stopped_clock.chats
SENT, ANSWERED, FALSE = (1, 0, 0), (1, 1, 0), (1, 0, 1)


def counted(chats):
    """Return sent, answered and false guide messages by policy."""
    found = {
        policy: (counts["sent"], counts["answered"], counts["false"])
        for policy, counts in stats.read_week(chats.store).items()
    }
    return {policy: counts for policy, counts in found.items() if any(counts)}


@each_row(
    "frames, expected",
    [
        # An answer counts once, for ten minutes. Pings and reading are none.
        ([(100, "ping"), (0, "read"), (0, "typing")], SENT),
        ([(100, "typing"), (400, "message"), (0, "message")], ANSWERED),
        ([(2.1, "message")], ANSWERED),
        ([(599, "message")], ANSWERED),
        ([(601, "message")], SENT),
        ([(1, "typing"), (700, "message")], FALSE),
        # Within two seconds nobody can have read it. It is false once, and never answered too.
        ([(1, "message")], FALSE),
        ([(1, "typing")], FALSE),
        ([(1, "typing"), (5, "message")], FALSE),
        ([(0.5, "typing"), (0.5, "message")], FALSE),
        ([(0.5, "read"), (0.5, "message")], FALSE),
        ([(5, "typing"), (5, "typing"), (5, "message")], ANSWERED),
    ],
)
def test_first_reaction_judges_the_message(frames, expected, chats, valkey):
    valkey.flushall()
    chats.policies(default=Policy(timedelta(seconds=60)))
    chats.deliver(chats.confirmed_silence())
    assert counted(chats) == {"default": SENT}
    for seconds, kind in frames:
        chats.pass_time(seconds)
        chats.user(kind=kind)
    assert counted(chats) == {"default": expected}


def test_message_to_typing_user_counts_as_false(chats):
    chats.policies(new=Policy(timedelta(seconds=5)))
    chats.user(tag="new")
    chats.user(kind="typing")
    chats.pass_time(5.2)
    (claim,) = chats.claim()
    chats.store.confirm([claim])
    chats.deliver(claim)
    chats.deliver(claim)  # a retry
    assert counted(chats) == {"new": FALSE}
    chats.pass_time(100)
    chats.user()
    assert counted(chats) == {"new": FALSE}


def test_retry_starts_the_time_again_and_counts_once(chats):
    claim = chats.confirmed_silence()
    chats.deliver(claim)
    chats.pass_time(590)
    chats.deliver(claim)
    chats.pass_time(100)
    chats.user()
    assert counted(chats) == {"default": ANSWERED}


@pytest.mark.parametrize("is_last_sent", [True, False])
def test_answer_counts_for_the_last_message_that_was_sent(chats, is_last_sent):
    chats.policies(default=Policy(timedelta(seconds=60), max_nudges=2, growth=1))
    chats.deliver(chats.confirmed_silence())
    chats.pass_time(61)
    (second,) = chats.claim()
    chats.store.confirm([second])
    chats.deliver(second, sent=is_last_sent)
    chats.pass_time(100)
    chats.user()
    assert counted(chats) == {"default": (1 + is_last_sent, 1, 0)}


@each_row(
    "kinds, expected",
    [
        (["message"], FALSE),
        (["typing"], FALSE),
        (["typing", "message"], FALSE),
        (["read", "message"], FALSE),
        (["read"], SENT),
    ],
)
def test_user_faster_than_the_mark_counts(kinds, expected, chats, valkey):
    """The last look permitted the message, and it is on its way."""
    valkey.flushall()
    chats.policies(default=Policy(timedelta(seconds=60)))
    claim = chats.confirmed_silence()
    assert chats.is_current(claim)
    for kind in kinds:
        chats.user(kind=kind)
    chats.note_sending(claim)
    assert counted(chats) == {"default": expected}


def test_answer_counts_if_the_mark_was_lost(chats):
    assert chats.is_current(chats.confirmed_silence())
    chats.pass_time(100)
    chats.user()
    assert counted(chats) == {"default": ANSWERED}


def test_messages_count_by_policy(chats):
    chats.policies(vip=Policy(timedelta(seconds=60)))
    for session, tag in (("s1", "vip"), ("s2", "nobody's"), ("s3", "")):
        claim = chats.claimed_silence(session, tag=tag)
        chats.store.confirm([claim])
        chats.deliver(claim)
    assert counted(chats) == {"vip": SENT, "default": (2, 0, 0)}


@pytest.fixture
def two_policies(chats):
    chats.policies(new=Policy(timedelta(seconds=60)), vip=Policy(timedelta(seconds=60)))
    return chats


@each_row(
    "frames, expected",
    [
        ([(100, "message")], ANSWERED),
        ([(100, "typing"), (5, "message")], ANSWERED),
        ([(1, "message")], FALSE),
        ([(1, "read"), (100, "message")], ANSWERED),
    ],
)
@pytest.mark.parametrize("has_mark", [True, False])
def test_reaction_counts_for_the_policy_of_its_message(has_mark, frames, expected, two_policies, valkey):
    """The customer gets another tag with the first frame after the message."""
    valkey.flushall()
    claim = two_policies.confirmed_silence(tag="new")
    assert two_policies.is_current(claim)
    if has_mark:
        two_policies.note_sending(claim)
    for seconds, kind in frames:
        two_policies.pass_time(seconds)
        two_policies.user(kind=kind, tag="vip")
    assert counted(two_policies) == {"new": expected}


def test_retry_keeps_the_policy_of_its_message(two_policies):
    claim = two_policies.confirmed_silence(tag="new")
    two_policies.deliver(claim)
    two_policies.user(kind="ping", tag="vip")
    two_policies.deliver(claim)
    two_policies.pass_time(100)
    two_policies.user()
    assert counted(two_policies) == {"new": ANSWERED}


@each_row(
    "frames",
    [
        [(0, "read")],
        [(1, "typing")],
        [(5, "typing")],
        [(1, "message")],
        [(1, "typing"), (1, "message")],
        [(5, "message")],
        [(1, "read"), (5, "typing"), (1, "message"), (1, "message")],
    ],
)
def test_stopped_message_does_not_stay_counted(frames, chats, valkey):
    """A frame counts a message that may be on its way. Then the ledger stops it."""
    valkey.flushall()
    chats.policies(default=Policy(timedelta(seconds=60)))
    claim = chats.confirmed_silence()
    assert chats.is_current(claim)
    for seconds, kind in frames:
        chats.pass_time(seconds)
        chats.user(kind=kind)
    for _ in range(2):
        chats.note_sending(claim, sent=False)
    chats.pass_time(100)
    chats.user()
    assert counted(chats) == {}


@pytest.mark.parametrize("kind", ["read", "typing", "message"])
def test_stopped_retry_of_a_sent_message_stays_counted(kind, chats):
    claim = chats.confirmed_silence()
    assert chats.is_current(claim)
    chats.user(kind=kind)
    chats.note_sending(claim)
    before = counted(chats)
    assert before["default"][0] == 1
    chats.note_sending(claim, sent=False)
    assert counted(chats) == before


def test_flush_loses_the_counts_and_nothing_else(chats):
    claim = chats.confirmed_silence()
    chats.deliver(claim)
    chats.store.server.client.flushall()
    chats.note_sending(claim)
    chats.user()
    assert counted(chats) == {}


# --- real deliveries, by the real clock: the calls that delivery makes are what is counted ----------------------------


@pytest.fixture
def running_chats(server, matrix):
    matrix.node("guide", "session.silent", delay=timedelta(0))
    return Chats(server)


def record_silences(chats, *session_ids):
    """Let sessions fall silent. Return their touches, in the order of the ids."""
    for session_id in session_ids:
        chats.user(session_id)
    claims = []
    eventually(lambda: claims.extend(chats.claim(lease=timedelta(minutes=10))) or len(claims) == len(session_ids))
    record_events([silence_event(each, each.deadline_ms) for each in claims])
    chats.store.confirm(claims)
    names = {each.session_id: f"{each.session_id}:{each.armed_at}" for each in claims}
    return [Touch.objects.get(event__event_id=names[session_id]).pk for session_id in session_ids]


@pytest.mark.django_db(transaction=True)
def test_delivered_message_is_counted(running_chats):
    running_chats.policies(default=Policy(timedelta(seconds=2)))
    touches = record_silences(running_chats, "s1", "back")
    running_chats.user("back")
    deliver(touches)
    assert [Touch.objects.get(pk=pk).reason or Touch.objects.get(pk=pk).state for pk in touches] == [
        "delivered", "answered",
    ]  # fmt: skip
    assert [stats.session_snapshot(running_chats.store, each).nudges for each in ("s1", "back")] == [1, 0]
    assert counted(running_chats) == {"default": SENT}


@pytest.mark.django_db(transaction=True)
def test_message_stopped_by_guard_uses_no_nudge(running_chats):
    running_chats.policies(default=Policy(timedelta(milliseconds=1)))
    (touch,) = record_silences(running_chats, "s1")
    node = Node.objects.get(key="guide")
    node.enabled = False
    node.save()
    deliver([touch])
    assert Touch.objects.get(pk=touch).reason == "node_disabled"
    assert stats.session_snapshot(running_chats.store, "s1").nudges == 0
    assert running_chats.agent().deadline_ms > 0
    assert counted(running_chats) == {}
