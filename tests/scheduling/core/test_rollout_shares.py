"""Who gets a new node or a new text first: sticky, even, and independent from node to node."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduling.policy.specs import HoldoutSpec, hash_to_percent, in_holdout, in_rollout, template_for
from tests.scheduling.core.sample_data import node, template

CHATS = [f"chat-{number}" for number in range(4000)]


def select(holds, percent):
    """Those for which it holds: the share of `percent`, within six standard deviations, which chance never exceeds."""
    found = {chat for chat in CHATS if holds(chat)}
    share = percent / 100
    assert abs(len(found) - len(CHATS) * share) < 6 * (len(CHATS) * share * (1 - share)) ** 0.5
    return found


def test_hash_to_percent_is_stable_and_even():
    # Fixed values: another hash would reassign all customers in the middle of a roll-out.
    places = {key: round(hash_to_percent("rollout:guide", key), 6) for key in ("ann", "bob", "群一")}
    assert places == {"ann": 34.861269, "bob": 77.2938, "群一": 61.384884}
    tenths = Counter(int(hash_to_percent("rollout:guide", chat) // 10) for chat in CHATS)
    assert all(abs(tenths[tenth] - 400) < 6 * 19 for tenth in range(10))


def test_shares_are_independent_of_other_nodes_and_purposes():
    half = node("a", rollout_percent=50, holdout_percent=50)
    for salt in ("rollout:b", "holdout:a"):
        select(lambda chat, salt=salt: in_rollout(half, chat, "ann") and hash_to_percent(salt, chat) < 50, 25)


@given(st.text(max_size=20), st.text(min_size=1, max_size=20), st.tuples(st.floats(0, 100), st.floats(0, 100)))
def test_rollout_member_stays_when_percent_grows(chat, user, percents):
    small, large = sorted(percents)
    if in_rollout(node(rollout_percent=small), chat, user):
        assert in_rollout(node(rollout_percent=large), chat, user)
    if in_holdout(node(holdout_percent=small), user):
        assert in_holdout(node(holdout_percent=large), user)


def test_rollout_goes_to_its_share_and_to_named_communities():
    select(lambda chat: in_rollout(node(rollout_percent=10), chat, "ann"), 10)
    named = node(rollout_percent=0, rollout_communities=frozenset({"c1"}))
    assert in_rollout(named, "c1", "ann")
    assert not any(in_rollout(named, chat, "ann") for chat in CHATS)
    assert all(in_rollout(node(rollout_percent=100), chat, "ann") for chat in CHATS)


def test_rollout_community_is_decided_as_one():
    half = node(rollout_percent=50)
    assert all(len({in_rollout(half, chat, user) for user in ("ann", "bob", "cid")}) == 1 for chat in CHATS[:50])
    assert {in_rollout(half, "", f"user-{number}") for number in range(50)} == {True, False}


def test_holdout_of_zero_holds_out_no_customer():
    assert not any(in_holdout(node(holdout_percent=0), user) for user in CHATS)
    assert all(in_holdout(node(holdout_percent=100), user) for user in CHATS)
    assert not any(HoldoutSpec(0).includes(user) for user in CHATS)


def test_global_holdout_is_stable_and_independent_of_nodes_and_keys():
    half, own = HoldoutSpec(50, "2026"), node(holdout_percent=50)
    assert select(half.includes, 50) < select(HoldoutSpec(70, "2026").includes, 70)
    select(lambda user: half.includes(user) and in_holdout(own, user), 25)
    select(lambda user: half.includes(user) and HoldoutSpec(50, "2027").includes(user), 25)


def test_canary_goes_to_a_stable_share_and_to_named_communities():
    def share(key, percent):
        each = node(canary_template=template(key), canary_percent=percent, canary_communities=frozenset({"c9"}))
        assert template_for(each, "c9", "ann").key == key
        return select(lambda chat: template_for(each, chat, "ann").key == key, int(percent))

    assert share("v2", 10) < share("v2", 50)
    assert len(share("v2", 50) & share("v3", 50)) < 1200, "each canary draws anew"
    assert template_for(node(), "c9", "ann").key == "guide"
