"""Many at the same moment, each with a connection of its own."""

from datetime import timedelta

import pytest
from django.conf import settings

from sessions.frames import Frame
from sessions.policy import CUSTOMER, Override, Policy
from sessions.store import stats
from sessions.store.sessions import COUNTED, ExpiredKey, Store
from tests.sessions import stopped_clock
from tests.sessions.conftest import ALWAYS, LEASE
from tests.sessions.stopped_clock import StoppedClockServer
from tests.support.second_connection import run_concurrently

chats = stopped_clock.chats  # threads that stall outlive leases and deadlines of a clock that runs


def race(chats, count, act):
    servers = [StoppedClockServer(settings.REDIS_URL) for _ in range(count)]

    stores = [Store(server, lambda: chats.plan, clock_offset=chats.store.clock_offset) for server in servers]
    for server in servers:
        server.client.ping()
    try:
        return run_concurrently(count, lambda number: act(stores[number], number))
    finally:
        for server in servers:
            server.client.close()


def test_concurrent_claims_of_one_silence_return_one(chats):
    chats.user()
    chats.pass_time(61)
    claims = race(chats, 64, lambda store, _: store.claim_silent(10, LEASE).silences)
    assert sorted(len(each) for each in claims) == [0] * 63 + [1]


def test_concurrent_watchers_share_silences_without_overlap(chats):
    chats.store.note_activity([Frame(f"s{number}", "ann") for number in range(1000)])
    chats.pass_time(61)

    def work(store, _):
        mine = []
        # At most a thousand passes find something: one that found the same silences for ever would not end.
        for _ in range(1001):
            if not (claims := store.claim_silent(2, LEASE).silences):
                return mine
            mine += claims
            assert store.confirm(claims) == len(claims)
        raise AssertionError(f"{len(mine)} silences were claimed, and there are still more")

    handed_in = [claim.session_id for mine in race(chats, 64, work) for claim in mine]
    assert len(handed_in) == 1000
    assert len(set(handed_in)) == 1000


def test_concurrent_frames_with_one_seq_count_once(chats):
    frame = Frame("s1", "ann", seq=7)
    noted = race(chats, 64, lambda store, _: store.note_activity([frame])[0].outcome)
    assert noted.count(COUNTED) == 1


def test_concurrent_expiries_of_one_key_are_one_silence(chats):
    news = race(
        chats, 64, lambda store, _: store.note_expired([ExpiredKey("ann", "session:ann")], window=timedelta(seconds=30))
    )  # fmt: skip
    assert sum(news) == 1


def test_concurrent_frame_and_claim_do_not_both_win(chats):
    """Either the frame came first and nothing is claimed, or the silence is over at its confirmation, or it was
    recorded and confirmed before the frame.
    """
    for number in range(50):
        session = f"s{number}"
        chats.user(session=session)
        chats.pass_time(61)

        def act(store, who, session=session):
            if who == 0:
                store.note_activity([Frame(session, "ann")])
                return []
            claims = store.claim_silent(10, LEASE).silences
            return claims if claims and store.confirm(claims) else []

        confirmed = [claim for claims in race(chats, 2, act) for claim in claims]
        assert all(not chats.is_current(claim) for claim in confirmed)
        shards = chats.store.shards()
        assert (sum(each.armed for each in shards), sum(each.in_flight for each in shards)) == (1, 0)
        chats.store.close(session, "ann")


def test_concurrent_messages_and_claims_are_one_step(chats):
    """In any order: the customer asks again and again, and each step is recorded once."""
    chats.policies(default=Policy(timedelta(seconds=60), after=CUSTOMER))
    for number in range(20):
        session = f"s{number}"
        chats.user(session=session)
        chats.pass_time(61)

        def act(store, who, session=session):
            if who > 1:
                store.note_activity([Frame(session, "ann", kind="message" if who == 2 else "ping")])
                return 0
            return store.confirm(store.claim_silent(10, LEASE).silences)

        assert sum(race(chats, 4, act)) == 1
        chats.pass_time(600)
        assert chats.claim() == []
        chats.store.close(session, "ann")


def test_concurrent_answer_and_claim_leave_no_open_step(chats):
    chats.policies(default=Policy(timedelta(seconds=60), max_nudges=3, growth=1, after=CUSTOMER))
    for number in range(30):
        session = f"s{number}"
        chats.user(session=session)
        chats.pass_time(61)

        def act(store, who, session=session):
            if who == 0:
                store.note_activity([Frame(session, "ann", sender="agent")])
                return []
            claims = store.claim_silent(10, LEASE).silences
            store.confirm(claims)
            return claims

        claims = [claim for found in race(chats, 3, act) for claim in found]
        assert len(claims) <= 1
        assert not any(chats.is_current(claim, send_until=None) for claim in claims)
        chats.pass_time(600)
        assert chats.claim() == []
        chats.store.close(session, "ann")


def test_concurrent_campaign_batches_are_applied_once(chats):
    """Watchers apply a campaign while frames and claims go on: each timer runs out once."""
    chats.store.note_activity([Frame(f"s{number}", "ann") for number in range(2000)])
    chats.pass_time(30)
    sale = Override(chats.now, chats.now + timedelta(hours=1), timedelta(seconds=300))
    chats.policies(campaigns=[sale])

    def act(store, who):
        if who == 0:
            for first in range(0, 1000, 100):
                store.note_activity([Frame(f"s{number}", "ann", kind="ping") for number in range(first, first + 100)])
        else:
            while store.rearm_for_campaign(20):
                pass

    race(chats, 5, act)
    chats.pass_time(260)
    assert chats.claim(2000) == []
    chats.pass_time(50)
    claims = chats.claim(2000)
    assert len({claim.session_id for claim in claims}) == len(claims) == 2000


def test_concurrent_note_sending_counts_once(chats):
    """In any order: the page of a silent user continues to ping, and gets one message."""
    for number in range(30):
        session = f"s{number}"
        claim = chats.confirmed_silence(session=session)
        assert chats.is_current(claim)

        def act(store, who, session=session, claim=claim):
            if who == 0:
                return store.note_activity([Frame(session, "ann", sender="agent")])[0].deadline_ms
            store.note_sending([(session, claim.armed_at)], [True])
            return 0

        assert race(chats, 4, act) == [0] * 4
        assert stats.session_snapshot(chats.store, session).nudges == 1
        assert chats.agent(session=session).deadline_ms == 0
        chats.store.close(session, "ann")


@pytest.mark.parametrize("released", [False, True])
def test_ping_between_claim_and_confirm_adds_no_message(chats, released):
    """In any order: the page of a silent user continues to ping, and gets one message."""
    for number in range(30):
        session = f"s{number}"
        chats.user(session=session)
        chats.pass_time(61)

        def act(store, who, session=session):
            if who > 0:
                store.note_activity([Frame(session, "ann", kind="ping")])
                return []
            claims = store.claim_silent(10, LEASE).silences
            if released and claims:  # its watcher lost the database while it committed
                store.release(claims)
                claims = store.claim_silent(10, LEASE).silences
            silences = [(each.session_id, each.armed_at) for each in claims]
            store.still_silent(silences, send_until=[ALWAYS] * len(claims))
            store.note_sending(silences, [True] * len(claims))
            store.confirm(claims)
            return claims

        sent = [claim for claims in race(chats, 4, act) for claim in claims]
        for _ in range(3):
            chats.user(session=session, kind="ping")
            chats.pass_time(61)
            claims = chats.claim()
            chats.store.confirm(claims)
            sent += claims
        assert len(sent) == 1
        chats.store.close(session, "ann")
