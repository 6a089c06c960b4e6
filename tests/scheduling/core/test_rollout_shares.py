"""Who gets a new node or a new text first: sticky, even, and independent from node to node."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from scheduling.policy.specs import HoldoutSpec, hash_to_percent, in_holdout, in_rollout, template_for
from tests.scheduling.core.sample_data import node, template

CHATS = [f"chat-{number}" for number in range(4000)]
GOLD = node(canary_template=template("guide-v2"), canary_percent=10, canary_communities=frozenset({"c9"}))


def test_hash_to_percent_is_stable() -> None:
    # Fixed values: another hash would reassign all customers in the middle of a roll-out.
    places = {key: round(hash_to_percent("rollout:guide", key), 6) for key in ("ann", "bob", "群一")}
    assert places == {"ann": 34.861269, "bob": 77.2938, "群一": 61.384884}


@given(st.text(max_size=40), st.text(max_size=40))
def test_hash_to_percent_is_between_0_and_100(salt: str, key: str) -> None:
    assert 0 <= hash_to_percent(salt, key) < 100


def test_hash_to_percent_is_evenly_distributed() -> None:
    tenths = Counter(int(hash_to_percent("rollout:guide", chat) // 10) for chat in CHATS)
    # 400 each are expected; six standard deviations (19 each) never happen by chance.
    assert all(abs(tenths[tenth] - 400) < 6 * 19 for tenth in range(10))


def test_hash_to_percent_is_independent_per_node() -> None:
    corners = Counter(
        (hash_to_percent("rollout:a", chat) < 50, hash_to_percent(salt, chat) < 50)
        for chat in CHATS
        for salt in ("rollout:b", "holdout:a")
    )
    assert all(abs(corners[left, right] - 2000) < 6 * 39 for left in (True, False) for right in (True, False))


@given(st.text(max_size=20), st.text(min_size=1, max_size=20), st.tuples(st.floats(0, 100), st.floats(0, 100)))
def test_rollout_member_stays_when_percent_grows(chat: str, user: str, percents: tuple[float, float]) -> None:
    small, large = sorted(percents)
    if in_rollout(node(rollout_percent=small), chat, user):
        assert in_rollout(node(rollout_percent=large), chat, user)
    if in_holdout(node(holdout_percent=small), user):
        assert in_holdout(node(holdout_percent=large), user)


def test_rollout_percent_selects_that_share() -> None:
    tenth = {chat for chat in CHATS if in_rollout(node(rollout_percent=10), chat, "ann")}
    half = {chat for chat in CHATS if in_rollout(node(rollout_percent=50), chat, "ann")}

    assert abs(len(tenth) - 400) < 6 * 19
    assert tenth < half


def test_rollout_named_communities_come_first() -> None:
    named = node(rollout_percent=0, rollout_communities=frozenset({"c1"}))
    assert in_rollout(named, "c1", "ann")
    assert not any(in_rollout(named, chat, "ann") for chat in CHATS)
    assert all(in_rollout(node(rollout_percent=100), chat, "ann") for chat in CHATS)


def test_rollout_community_is_decided_as_one() -> None:
    half = node(rollout_percent=50)
    assert all(len({in_rollout(half, chat, user) for user in ("ann", "bob", "cid")}) == 1 for chat in CHATS[:50])
    assert {in_rollout(half, "", f"user-{number}") for number in range(50)} == {True, False}


def test_holdout_of_zero_holds_out_no_customer() -> None:
    assert not any(in_holdout(node(holdout_percent=0), user) for user in CHATS)
    assert all(in_holdout(node(holdout_percent=100), user) for user in CHATS)


def test_global_holdout_is_stable_and_independent_of_nodes_and_keys() -> None:
    half, more = HoldoutSpec(50, "2026"), HoldoutSpec(70, "2026")
    inside = {user for user in CHATS if half.includes(user)}
    assert abs(len(inside) - 2000) < 6 * 32
    assert inside < {user for user in CHATS if more.includes(user)}
    own, other = node(holdout_percent=50), HoldoutSpec(50, "2027")
    for both in ({user for user in inside if in_holdout(own, user)}, {user for user in inside if other.includes(user)}):
        assert abs(len(both) - 1000) < 6 * 28
    assert not HoldoutSpec(0).includes("ann")


def test_canary_goes_to_share_and_named_communities() -> None:
    share = [chat for chat in CHATS if template_for(GOLD, chat, "ann").key == "guide-v2"]

    assert abs(len(share) - 400) < 6 * 19
    assert template_for(GOLD, "c9", "ann").key == "guide-v2"
    assert template_for(node(), "c9", "ann").key == "guide"


def test_canary_share_is_stable_and_new_per_canary() -> None:
    def share(key: str, percent: float) -> set[str]:
        each = node(canary_template=template(key), canary_percent=percent)
        return {chat for chat in CHATS if template_for(each, chat, "ann").key == key}

    assert share("v2", 10) < share("v2", 50)
    assert len(share("v2", 50) & share("v3", 50)) < 1200
