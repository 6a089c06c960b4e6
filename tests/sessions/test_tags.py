"""Several tags a session: which policy applies, a campaign that reaches running timers, a wait at the last moment."""

from datetime import timedelta

import pytest

from sessions import tokens
from sessions.frames import Frame
from sessions.policy import CUSTOMER, TYPING, Override, Policy
from sessions.store import stats
from tests.sessions import stopped_clock
from tests.support.tables import each_row

SECOND = timedelta(seconds=1)


chats = stopped_clock.chats


@pytest.fixture
def tagged(chats):
    chats.policies(
        new=Policy(30 * SECOND), vip=Policy(180 * SECOND),
        new_vip=Policy(20 * SECOND, tags=("vip", "new")), also_vip=Policy(99 * SECOND, tags=("vip", "old")),
        big_vip=Policy(20 * SECOND, tags=("vip", "big")),
    )  # fmt: skip
    return chats


def deadline(chats, session="s1"):
    found = stats.session_snapshot(chats.store, session).deadline
    assert found
    return found


@each_row(
    "tags, policy, chosen_by, seconds",
    [
        ((), "default", (), 60),
        (("new",), "new", ("new",), 30),
        (("sale", "new"), "new", ("new",), 30),
        (("vip", "new", "sale"), "new_vip", ("new", "vip"), 20),
        # Two fit with the same number of tags: the shorter threshold, then the first by key.
        (("old", "vip", "new"), "new_vip", ("new", "vip"), 20),
        (("vip", "new", "big"), "big_vip", ("big", "vip"), 20),
        (("vipp", "ne"), "default", (), 60),
    ],
)
def test_most_specific_policy_applies(tagged, tags, policy, chosen_by, seconds):
    assert tagged.seconds_left(tagged.user(tags=tags)) == pytest.approx(seconds, abs=0.001)
    found = stats.session_snapshot(tagged.store, "s1")
    assert found.policy[:2] == (policy, chosen_by)
    assert found.tags == (tuple(sorted(tags)) or ("default",))
    tagged.pass_time(seconds + 1)
    (claim,) = tagged.claim()
    assert (claim.policy, claim.policy_version, claim.tags) == (policy, 1, found.tags)


def test_tag_and_tags_replace_those_of_the_session(tagged):
    tagged.user(tag="vip", tags=("new",))
    assert tagged.seconds_left(tagged.agent()) == pytest.approx(20, abs=0.001)
    assert tagged.seconds_left(tagged.user(tags=("new", "new"))) == pytest.approx(30, abs=0.001)
    tagged.user(tags=("vip",), first_tag=True)
    assert stats.session_snapshot(tagged.store, "s1").tags == ("new",)


def test_token_keeps_tags():
    token, _ = tokens.issue_token(tokens.Admission("s1", "ann", "", "", "user", tags=("new", "vip")), SECOND * 60)
    assert tokens.verify_token(token, "s1").frame("ping").joined_tags == "new\nvip"


# --- a campaign reaches running timers ---


def begin_campaign(chats, seconds, ago=0, **policies):
    sale = Override(chats.now - ago * SECOND, chats.now + timedelta(hours=1), seconds * SECOND)
    chats.policies(campaigns=[sale], **policies)


def apply_campaign(chats, limit=200):
    passes = 0
    while chats.store.rearm_for_campaign(limit):
        passes += 1
        assert passes < 1000
    return passes


def test_campaign_leaves_what_is_due_within_a_second(chats):
    chats.user()
    chats.pass_time(59.5)
    before = deadline(chats)
    begin_campaign(chats, 3600)
    apply_campaign(chats)
    assert deadline(chats) == before


def test_shorter_campaign_spreads_passed_deadlines(chats):
    for number in range(50):
        chats.user(f"s{number}")
    chats.pass_time(40)
    begin_campaign(chats, 10)
    apply_campaign(chats)
    left = [(deadline(chats, f"s{number}") - chats.now).total_seconds() for number in range(50)]
    assert all(1 < each <= 11.01 for each in left)
    assert max(left) - min(left) > 3


def test_campaign_keeps_waits_for_agents_graces_claims_and_keys(chats):
    plans = {"sla": Policy(60 * SECOND, after=CUSTOMER), "vip": Policy(60 * SECOND, grace=20 * SECOND)}
    chats.policies(**plans)
    chats.user("sla", tag="sla")
    chats.user("graced", tag="vip")
    chats.user("claimed")
    chats.pass_time(61)
    assert {claim.session_id for claim in chats.claim()} == {"sla", "claimed"}
    chats.user("sla2", tag="sla")
    before = {each: deadline(chats, each) for each in ("sla", "graced", "claimed", "sla2")}
    begin_campaign(chats, 600, **plans)
    apply_campaign(chats)
    assert {each: deadline(chats, each) for each in before} == before


def test_campaign_reaches_many_chats_in_bounded_batches(chats):
    chats.store.note_activity([Frame(f"s{number}", "ann") for number in range(6000)])
    chats.pass_time(10)
    begin_campaign(chats, 300)
    assert apply_campaign(chats, 50) > 2
    chats.pass_time(100)
    assert chats.claim(10_000) == []
    chats.pass_time(191)
    assert len(chats.claim(10_000)) == 6000


def test_edited_campaign_moves_running_timers(chats):
    start = chats.now
    chats.user()
    begin_campaign(chats, 90)
    apply_campaign(chats)
    chats.user("s2")
    chats.pass_time(10)
    begin_campaign(chats, 120, ago=(chats.now - start).total_seconds())
    chats.user("s3")
    assert apply_campaign(chats) == 1
    left = {each: (deadline(chats, each) - chats.now).total_seconds() for each in ("s1", "s2", "s3")}
    assert left == pytest.approx({"s1": 110, "s2": 110, "s3": 120}, abs=0.01)
    assert apply_campaign(chats) == 0


# --- a wait at the last moment ---


def test_grace_for_typing_needs_a_typing_user(chats):
    chats.policies(default=Policy(60 * SECOND, grace=20 * SECOND, grace_for=TYPING))
    chats.user()
    chats.user("s2")
    chats.user("s2", kind="typing")
    chats.user("s3", kind="typing")
    chats.user("s3")
    chats.pass_time(61)
    assert {claim.session_id for claim in chats.claim()} == {"s1", "s3"}
    chats.pass_time(21)
    assert [claim.session_id for claim in chats.claim()] == ["s2"]


def test_grace_over_closed_hours_keeps_the_silence(chats):
    """The extension ends days later than a session without frames is kept."""
    opens = [(chats.now - timedelta(hours=1), chats.now + 61 * SECOND)]
    opens += [(chats.now + timedelta(hours=60), chats.now + timedelta(hours=61))]
    chats.policies(default=Policy(60 * SECOND, grace=20 * SECOND, hours=opens))
    chats.user()
    chats.pass_time(60.5)
    assert chats.claim() == []
    left = (deadline(chats) - chats.now).total_seconds()
    assert left > 59 * 3600
    client = chats.store.server.client
    assert client.pttl(next(client.scan_iter("*:s:s1"))) > left * 1000
    chats.pass_time(left + 1)
    (claim,) = chats.claim()
    assert chats.store.confirm([claim]) == 1
    assert chats.store.shards()[0].counts == {}
