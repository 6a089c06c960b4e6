"""Whose message a timer runs after: the customer is silent, or no agent answers the customer."""

from datetime import timedelta

import pytest

from sessions.detection.presence import UNANSWERED, SessionPresence
from sessions.detection.silence_events import silence_event
from sessions.policy import AGENT, CUSTOMER, Policy
from sessions.store import stats
from sessions.store.sessions import COUNTED, FrameEffect
from tests.sessions import stopped_clock
from tests.sessions.test_presence import silence_question

MINUTE = timedelta(minutes=1)


chats = stopped_clock.chats


@pytest.fixture
def after_agent(chats):
    chats.policies(default=Policy(MINUTE, after=AGENT))
    return chats


@pytest.fixture
def after_customer(chats):
    """Three steps, a minute apart."""
    chats.policies(default=Policy(MINUTE, max_nudges=3, growth=1, after=CUSTOMER))
    return chats


def look(chats):
    return stats.session_snapshot(chats.store, "s1")


def test_after_agent_arms_only_while_agent_wrote_last(after_agent):
    chats = after_agent
    assert chats.user() == FrameEffect(COUNTED, 0)
    assert (look(chats).state, look(chats).why) == ("idle", "customer_wrote")
    assert chats.user(kind="ping").deadline_ms == 0
    assert chats.agent(kind="resume").deadline_ms == 0
    assert chats.seconds_left(chats.agent()) == pytest.approx(60, abs=0.001)
    chats.pass_time(50)
    assert chats.seconds_left(chats.user(kind="ping")) == pytest.approx(60, abs=0.001)
    assert (look(chats).state, look(chats).awaited) == ("armed", "customer")
    assert chats.user().deadline_ms == 0
    assert chats.store.shards()[0].armed == 0
    chats.pass_time(61)
    assert chats.claim() == []
    chats.agent()
    chats.pass_time(61)
    (claim,) = chats.claim()
    assert silence_event(claim, claim.deadline_ms).data["awaited"] == "customer"


@pytest.mark.parametrize("after", [AGENT, CUSTOMER])
def test_lost_session_waits_for_next_message(chats, after):
    """After a loss a ping does not show who wrote last, so no one is accused of silence."""
    chats.policies(default=Policy(MINUTE, after=after))
    chats.store.server.client.flushall()
    chats.user(kind="ping")
    assert chats.user(kind="ping", spoken=True) == FrameEffect(COUNTED, 0)
    assert look(chats).why == "unknown_writer"
    assert (chats.agent() if after == AGENT else chats.user()).deadline_ms > 0


def test_step_reserves_no_guide_message_and_is_never_stale(after_customer):
    chats = after_customer
    claim = chats.confirmed_silence()
    live = SessionPresence(chats.store)
    question = silence_question(claim, going_out=True)._replace(event_type=UNANSWERED)
    chats.pass_time(7200)
    assert live.presence_blocks([question]) == [""]
    live.note_sending([question], [True])
    assert look(chats).nudges == 0
    chats.agent()
    assert live.presence_blocks([question]) == ["answered"]


def test_policy_switch_starts_the_other_timer(chats):
    """Steps for the agent and guide messages to the customer are counted apart."""
    claim = chats.confirmed_silence()
    chats.deliver(claim)
    chats.policies(default=Policy(MINUTE, max_nudges=2, growth=1, after=CUSTOMER))
    assert chats.seconds_left(chats.user(kind="ping")) == pytest.approx(60, abs=0.001)
    chats.pass_time(61)
    (step,) = chats.claim()
    assert (step.nudge, step.for_agent) == (1, True)
    chats.policies(default=Policy(MINUTE, max_nudges=2))
    chats.store.confirm([step])
    assert chats.claim() == []
    chats.user(kind="ping")
    chats.pass_time(121)
    (second,) = chats.claim()
    assert (second.nudge, second.for_agent) == (2, False)


@pytest.fixture(params=["any", AGENT])
def both_sides(chats, request):
    """Two policies fit: the customer has a minute, the agent half a minute."""
    chats.policies(
        default=Policy(MINUTE, after=request.param), help=Policy(MINUTE / 2, max_nudges=2, growth=1, after=CUSTOMER)
    )
    return chats


def test_both_policies_run_by_turns(both_sides):
    chats = both_sides
    assert chats.seconds_left(chats.user(tag="help")) == pytest.approx(30, abs=0.001)
    assert (look(chats).awaited, look(chats).policy.key) == ("agent", "help")
    chats.pass_time(20)
    chats.user()
    assert chats.seconds_left(chats.user(kind="typing")) == pytest.approx(10, abs=0.001)
    assert chats.seconds_left(chats.agent()) == pytest.approx(60, abs=0.001)
    assert (look(chats).awaited, look(chats).policy.key) == ("customer", "default")
    chats.pass_time(61)
    (guide,) = chats.claim()
    assert (guide.policy, guide.nudge, guide.for_agent) == ("default", 1, False)
    chats.store.confirm([guide])
    chats.deliver(guide)
    assert chats.seconds_left(chats.user()) == pytest.approx(30, abs=0.001)
    for step in (1, 2):
        chats.pass_time(31)
        (claim,) = chats.claim()
        assert (claim.policy, claim.nudge, claim.for_agent) == ("help", step, True)
        chats.store.confirm([claim])
    chats.pass_time(600)
    assert chats.claim() == []
    assert {each.policy: each.armed for each in stats.read_overview(chats.store).policies} == {}


def test_counts_and_pauses_follow_the_awaited_side(both_sides):
    chats = both_sides
    chats.user(tag="help")
    chats.agent(kind="tool")
    assert look(chats).state == "armed"
    chats.agent()
    chats.agent(kind="tool")
    assert (look(chats).state, look(chats).why) == ("paused", "tool")
    counts = {each.policy: (each.armed, each.paused) for each in stats.read_overview(chats.store).policies}
    assert counts == {"default": (0, 1)}
    chats.user()
    counts = {each.policy: (each.armed, each.paused) for each in stats.read_overview(chats.store).policies}
    assert (look(chats).state, counts) == ("armed", {"help": (1, 0)})


def at(chats, hours):
    return chats.now + timedelta(hours=hours)


def test_closed_hours_do_not_count(chats):
    spans = [(at(chats, -1), at(chats, 0.5)), (at(chats, 60), at(chats, 61)), (at(chats, 70), at(chats, 80))]
    chats.policies(
        default=Policy(timedelta(hours=1), max_nudges=2, growth=1, after=CUSTOMER, hours=spans), any=Policy(MINUTE)
    )
    assert chats.seconds_left(chats.user()) == pytest.approx(60.5 * 3600, abs=0.01)
    chats.user(kind="ping")
    ttl = chats.store.server.client.pttl(next(chats.store.server.client.scan_iter("*:s:s1")))
    assert ttl > 61 * 3600_000
    chats.pass_time(60.5 * 3600 + 1)
    (claim,) = chats.claim()
    chats.store.confirm([claim])
    # Half an hour of the next step passes today, the rest after the pause.
    assert (look(chats).deadline - chats.now).total_seconds() == pytest.approx(10 * 3600, abs=5)


def test_closed_time_after_the_known_hours_counts(chats):
    chats.policies(default=Policy(MINUTE, hours=[(at(chats, -2), at(chats, -1))]))
    assert chats.seconds_left(chats.user()) == pytest.approx(60, abs=0.001)
