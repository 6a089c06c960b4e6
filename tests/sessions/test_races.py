"""Many at the same moment, each with a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
from django.conf import settings

from sessions.frames import Frame
from sessions.store import stats
from sessions.store.client import Server
from sessions.store.sessions import COUNTED, ClaimedSilence, Store
from tests.sessions.conftest import ALWAYS, LEASE, Chats

Answer = TypeVar("Answer")
WAIT_LIMIT = 30


def race(chats: Chats, count: int, act: Callable[[Store, int], Answer]) -> list[Answer]:
    start = threading.Barrier(count)

    def run(number: int) -> Answer:
        server = Server(settings.REDIS_URL)
        try:
            server.client.ping()
            start.wait(WAIT_LIMIT)
            return act(Store(server, lambda: chats.plan, clock_offset=chats.store.clock_offset), number)
        finally:
            server.client.close()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_concurrent_claims_of_one_silence_return_one(chats: Chats) -> None:
    chats.user()
    chats.pass_time(61)
    claims = race(chats, 64, lambda store, _: store.claim_silent(10, LEASE).silences)
    assert sorted(len(each) for each in claims) == [0] * 63 + [1]


def test_concurrent_watchers_share_silences_without_overlap(chats: Chats) -> None:
    chats.store.note_activity([Frame(f"s{number}", "ann") for number in range(1000)])
    chats.pass_time(61)

    def work(store: Store, _: int) -> list[ClaimedSilence]:
        mine: list[ClaimedSilence] = []
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


def test_concurrent_frames_with_one_seq_count_once(chats: Chats) -> None:
    frame = Frame("s1", "ann", seq=7)
    noted = race(chats, 64, lambda store, _: store.note_activity([frame])[0].outcome)
    assert noted.count(COUNTED) == 1


def test_concurrent_expiries_of_one_key_are_one_silence(chats: Chats) -> None:
    news = race(
        chats, 64, lambda store, _: store.note_expired([("ann", "session:ann")], window=timedelta(seconds=30))
    )  # fmt: skip
    assert sum(news) == 1


def test_concurrent_frame_and_claim_do_not_both_win(chats: Chats) -> None:
    """Either the frame came first and nothing is claimed, or the claim's silence is over when it is confirmed, or it
    was handed in and confirmed before the frame came."""
    for number in range(50):
        session = f"s{number}"
        chats.user(session=session)
        chats.pass_time(61)

        def act(store: Store, who: int, session: str = session) -> list[ClaimedSilence]:
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


def test_concurrent_note_sending_counts_once(chats: Chats) -> None:
    """Whichever comes first: the policy allows one message, so no timer runs after a word of the agent."""
    for number in range(30):
        session = f"s{number}"
        chats.user(session=session)
        chats.pass_time(61)
        (claim,) = chats.claim()
        chats.store.confirm([claim])
        assert chats.is_current(claim)

        def act(store: Store, who: int, session: str = session, claim: ClaimedSilence = claim) -> int:
            if who == 0:
                return store.note_activity([Frame(session, "ann", sender="agent")])[0].deadline_ms
            store.note_sending([(session, claim.armed_at)], [True])
            return 0

        assert race(chats, 4, act) == [0] * 4
        assert stats.session_snapshot(chats.store, session).nudges == 1
        assert chats.agent(session=session).deadline_ms == 0
        chats.store.close(session, "ann")


@pytest.mark.parametrize("released", [False, True])
def test_ping_between_claim_and_confirm_adds_no_message(chats: Chats, released: bool) -> None:
    """Whichever comes first: the page of a user who says nothing goes on pinging, and gets one message."""
    for number in range(30):
        session = f"s{number}"
        chats.user(session=session)
        chats.pass_time(61)

        def act(store: Store, who: int, session: str = session) -> list[ClaimedSilence]:
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
