"""The number of live chats by tag, also in `/metrics`."""

import json
from datetime import timedelta

import pytest

from config.local.processes import select_port
from sessions.models import SilencePolicy
from sessions.policy import AGENT, Policy
from sessions.store import client as keys
from sessions.store import sessions, stats
from sessions.store.sessions import PAUSE_COUNTS, ExpiredKey
from tests.sessions.conftest import count_nudges
from tests.sessions.stopped_clock import chats_on_both as chats_on_both

MINUTE = Policy(timedelta(seconds=60))


def counts_by_policy(chats):
    return {each.policy: (each.armed, each.paused) for each in stats.read_overview(chats.store).policies}


def test_overview_counts_chats_by_tag_and_state(chats):
    chats.policies(vip=MINUTE, new=MINUTE)
    for session, tag in (("s1", "vip"), ("s2", "vip"), ("s3", "new"), ("s4", ""), ("s5", "nobody's")):
        chats.user(session, tag=tag)
    assert counts_by_policy(chats) == {"vip": (2, 0), "new": (1, 0), "default": (2, 0)}
    chats.user("s1", kind="ping")
    chats.user("s2", tag="new")
    chats.agent("s3", kind="transfer")
    chats.agent("s4", kind="typing")
    chats.user("s5", kind="close")
    chats.user("s5", kind="ping")
    assert counts_by_policy(chats) == {"vip": (1, 0), "new": (1, 1), "default": (1, 0)}
    chats.agent("s3", kind="resume")
    assert counts_by_policy(chats) == {"vip": (1, 0), "new": (2, 0), "default": (1, 0)}


def test_chat_is_live_until_silence_is_confirmed(chats):
    chats.policies(vip=Policy(timedelta(seconds=60), max_nudges=2))
    chats.user("s1", tag="vip")
    chats.user("s2")
    chats.pass_time(61)
    claims = chats.claim()
    found = stats.read_overview(chats.store)
    assert (found.live, found.armed, found.in_flight) == (2, 2, 2)
    chats.store.confirm(claims)
    chats.store.confirm(claims)
    found = stats.read_overview(chats.store)
    assert (found.live, found.in_flight, counts_by_policy(chats)) == (1, 0, {"vip": (1, 0)})
    chats.pass_time(121)
    chats.store.confirm(chats.claim())
    assert (stats.read_overview(chats.store).live, counts_by_policy(chats)) == (0, {})
    chats.user("s1")
    assert counts_by_policy(chats) == {"vip": (1, 0)}


def listed(chats, state=""):
    return {each.session_id: each.why for each in stats.list_live_sessions(chats.store, 100, state)}


def idle_ids(chats):
    found = chats.store.server.ask(lambda pipe: [pipe.zrange(key, 0, -1) for key in keys.IDLE])
    return {keys.decode_text(each) for group in found for each in group}


def test_list_has_chats_without_a_timer_and_their_reason(chats_on_both):
    chats = chats_on_both
    chats.policies(default=Policy(timedelta(seconds=60), after=AGENT), once=MINUTE)
    chats.user("customer-last")
    chats.user("typing", kind="typing")
    chats.user("paused", tag="once")
    chats.agent("paused", kind="tool")
    chats.user("guided", tag="once")
    assert idle_ids(chats) == {"customer-last", "typing"}
    chats.pass_time(61)
    (claim,) = chats.claim()
    assert listed(chats, "silent") == {"guided": "silent"} | listed(chats, "idle")
    chats.store.confirm([claim])
    assert listed(chats) == {
        "customer-last": "customer_wrote", "typing": "no_message", "paused": "tool", "guided": "silent",
    }  # fmt: skip
    assert "paused" not in listed(chats, "idle")
    chats.agent("customer-last")
    chats.agent("paused", kind="resume")
    chats.user("guided", tag="once")
    chats.user("typing", kind="close")
    assert idle_ids(chats) == set()
    assert listed(chats, "idle") == {}
    chats.user("typing")  # the closed chat is open again
    assert idle_ids(chats) == {"typing"}
    chats.pass_time(1)
    chats.user("customer-last")
    chats.user("customer-last")
    assert list(listed(chats, "idle")) == ["customer-last", "typing"]


def test_list_of_chats_without_a_timer_is_bounded_by_number_and_age(chats):
    chats.policies(default=Policy(timedelta(seconds=60), after=AGENT))
    same = [name for name in map(str, range(8_000)) if keys.shard_of(name) == 3][:301]
    other = same.pop()
    for session in same:
        chats.user(session, user_id=session)
        chats.pass_time(0.001)
    assert idle_ids(chats) == set(same[-256:])
    assert list(listed(chats, "idle"))[:2] == [same[-1], same[-2]]
    server = chats.store.server.client
    assert 0 < server.pttl(keys.IDLE[3]) <= 86_400_000
    chats.pass_time(86_401)
    chats.user(other, user_id=other)
    assert idle_ids(chats) == {other}


def test_armed_chat_outside_the_hours_of_its_policy_gives_that_reason(chats):
    opens = chats.now + timedelta(hours=1)
    chats.policies(default=Policy(timedelta(seconds=60), hours=[(opens, opens + timedelta(hours=8))]))
    chats.user("s1")
    assert listed(chats) == {"s1": "outside_hours"}
    day = timedelta(hours=8)
    for hours in ([(opens - day, opens)], [(opens - 3 * day, opens - 2 * day)]):  # open; and beyond the known hours
        chats.policies(default=Policy(timedelta(seconds=60), hours=hours))
        assert listed(chats) == {"s1": "armed"}


def test_expired_key_chat_is_counted(chats):
    for _ in range(2):
        chats.store.note_expired([ExpiredKey("ann", "session:ann")], window=timedelta(0), tag="vip")
    assert counts_by_policy(chats) == {"default": (1, 0)}
    chats.store.confirm(chats.claim())
    assert counts_by_policy(chats) == {}


def test_endless_pause_is_forgotten(chats):
    chats.user("s1")
    chats.agent("s1", kind="transfer")
    chats.pass_time(PAUSE_COUNTS.total_seconds() - 60)
    assert counts_by_policy(chats) == {"default": (0, 1)}
    chats.user("s1", kind="ping")
    chats.pass_time(120)
    assert counts_by_policy(chats) == {"default": (0, 1)}
    chats.pass_time(PAUSE_COUNTS.total_seconds())
    assert counts_by_policy(chats) == {}
    assert not chats.store.server.client.exists(*keys.PAUSED, *keys.COUNTS)
    chats.agent("s1")
    assert counts_by_policy(chats) == {"default": (1, 0)}


def test_lost_session_is_removed_from_counts(chats):
    chats.user("s1")
    client = chats.store.server.client
    client.delete(f"{keys.SESSION[keys.shard_of('s1')]}s1")
    assert counts_by_policy(chats) == {"default": (1, 0)}
    chats.pass_time(61)
    assert chats.claim() == []
    assert counts_by_policy(chats) == {}


def test_overview_lag_is_age_of_oldest_deadline(chats):
    chats.user("s1")
    assert stats.read_overview(chats.store).lag_ms == 0
    chats.pass_time(63)
    assert 2_900 <= stats.read_overview(chats.store).lag_ms <= 60_000
    chats.claim()
    assert stats.read_overview(chats.store).lag_ms == 0


def test_reports_of_ended_watchers_are_deleted(chats):
    """One that crashes every two seconds beside one that is well would leave 43,000 names a day, read at each look."""
    client, fresh = chats.store.server.client, {"latest_ms": 0, "handed_in": 0, "waits": False}
    now_ms = round(chats.now.timestamp() * 1000)
    for pid in range(50):
        old = {"at": now_ms - stats.REPORT_LIFETIME_MS - pid * 2_000, **fresh}
        client.hset(keys.WATCHERS, f"node:-{pid}", json.dumps(old))
    client.hset(keys.WATCHERS, "node:other", json.dumps({"at": now_ms + stats.REPORT_LIFETIME_MS, **fresh}))
    stats.send_report(chats.store, stats.WatcherReport(), waits=False)
    assert client.hlen(keys.WATCHERS) == 2
    assert len(stats.running_watchers(chats.store)) == 2
    assert client.ttl(keys.WATCHERS) > 0


def test_overview_cost_is_independent_of_chat_count(chats):
    def commands(count):
        for number in range(count):
            chats.user(f"s{number}")
        return min(commands_of_overview() for _ in range(3))  # a web process of an earlier test may ask in between

    def commands_of_overview():
        client = chats.store.server.client
        before = client.info("commandstats")
        stats.read_overview(chats.store)
        after = client.info("commandstats")
        return sum(each["calls"] - before.get(name, {"calls": 0})["calls"] for name, each in after.items())

    few = commands(16 * 4)
    assert commands(16 * 40) <= few + 16


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_metrics_report_chats_silences_lag_and_messages(client, chats):
    SilencePolicy.objects.create(key="vip", threshold=timedelta(seconds=60))
    chats.policies(vip=MINUTE)
    chats.user("s1", tag="vip")
    chats.user("s2", tag="vip")
    chats.agent("s2", kind="queue")
    chats.user("s3", tag="vip")
    chats.pass_time(62)
    report, claims = stats.WatcherReport(), chats.claim()
    chats.store.confirm(claims)
    report.count(claims, 0)
    stats.send_report(chats.store, report, waits=False)
    chats.user("s1", tag="vip")
    for days_ago, outcomes in ((0, {"sent": 10, "answered": 4, "false": 1}), (7, {"sent": 100})):
        count_nudges(chats.store, "vip", days_ago, **outcomes)
    lines = client.get("/metrics").content.decode().splitlines()
    for line in (
        'aftertouch_sessions{policy="vip",state="armed"} 1.0', 'aftertouch_sessions{policy="vip",state="paused"} 1.0',
        'aftertouch_silences_total{policy="vip"} 2.0', "aftertouch_silence_lag_seconds 0.0",
        "aftertouch_silences_in_flight 0.0", 'aftertouch_nudges{outcome="sent",policy="vip"} 10.0',
        'aftertouch_nudges{outcome="answered",policy="vip"} 4.0', 'aftertouch_nudges{outcome="false",policy="vip"} 1.0',
    ):  # fmt: skip
        assert line in lines, line


@pytest.mark.django_db
def test_metrics_without_store_keep_database_figures(client, settings):
    settings.REDIS_URL = f"redis://127.0.0.1:{select_port()}/0"
    try:
        said = client.get("/metrics").content.decode()
    finally:
        sessions._store_of_url.cache_clear()
    assert "aftertouch_touches_oldest_overdue_seconds" in said
    assert "aftertouch_nudges" not in said
    assert "aftertouch_sessions" not in said
    assert "aftertouch_silence" not in said
