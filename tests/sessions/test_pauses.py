"""Pauses of customers: what counts as one, by policy and length."""

from datetime import timedelta

import pytest

from sessions.policy import Policy
from sessions.store import client, stats
from tests.sessions import stopped_clock

chats = stopped_clock.chats


def counted(chats):
    """Return the counts by policy and upper end, s."""
    ends = (*stats.PAUSE_ENDS, 10**6)
    return {
        policy: {ends[int(place) - 1]: count for place, count in counts.items()}
        for policy, counts in stats.read_week(chats.store).items()
    }


def test_pause_ends_when_the_user_starts_to_type(chats):
    chats.policies(vip=Policy(timedelta(minutes=3)))
    chats.user(tag="vip")
    assert counted(chats) == {}, "a first message ends no pause"
    chats.pass_time(40)
    chats.user(kind="ping")
    chats.agent()
    chats.pass_time(100)
    chats.user(kind="typing")
    chats.pass_time(8)
    chats.user(kind="typing")
    chats.user()
    assert counted(chats) == {"vip": {120: 1}}
    chats.pass_time(3_000)
    chats.user()
    chats.user("s2")
    chats.pass_time(12)
    chats.user("s2")
    assert counted(chats) == {"vip": {120: 1, 10**6: 1}, "default": {15: 1}}


def test_repeated_frame_counts_no_second_pause(chats):
    chats.user(seq=1)
    chats.pass_time(20)
    for _ in range(2):
        chats.user(seq=2)
    assert counted(chats) == {"default": {30: 1}}


@pytest.mark.usefixtures("fixed_hour")  # the key names the day
def test_pauses_of_a_day_expire(chats):
    chats.user()
    chats.pass_time(20)
    chats.user()
    key = client.day_keys()[client.shard_of("s1")]
    (left,) = chats.store.server.ask(lambda pipe: [pipe.pttl(key)])
    assert 7 * 86_400_000 < left <= 8 * 86_400_000
