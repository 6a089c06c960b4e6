"""Guide messages answered or unnecessary: real touches in the database, real frames in the store, and the store's clock
moved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.utils.timezone import now

from scheduling import sql
from scheduling.ledger import ends
from scheduling.models import Attempt, Touch, Verdict
from scheduling.planning.ingest import record_events
from sessions.detection import nudge_stats
from sessions.detection.silence_events import silence_event
from sessions.models import NudgeMark, NudgeTally
from sessions.policy import Policy
from sessions.store import client as keys
from sessions.store import sessions, stats
from sessions.store.sessions import ClaimedSilence
from tests.scheduling.api.serving import eventually
from tests.scheduling.core.conftest import deliver
from tests.sessions.conftest import Chats
from tests.support.matrix import MatrixBuilder
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

MOMENT = timedelta(milliseconds=1)


class Guide:
    """Lets chats fall silent and sends guide messages into them, without a worker."""

    def __init__(self, chats: Chats, matrix: MatrixBuilder) -> None:
        self.chats = chats
        self.node = matrix.node("guide", "session.silent", delay=timedelta(0))

    def silence(self, session: str = "s1", tag: str = "") -> ClaimedSilence:
        """Recorded and confirmed; its touch waits."""
        claim = self.chats.claimed_silence(session, tag=tag)
        record_events([silence_event(claim, claim.deadline_ms)])
        self.chats.store.confirm([claim])
        return claim

    def touch(self, claim: ClaimedSilence) -> Touch:
        return Touch.objects.filter(event__event_id=f"{claim.session_id}:{claim.armed_at}").latest("created_at")

    def send(
        self,
        claim: ClaimedSilence,
        *,
        waits: timedelta = timedelta(0),
        takes: timedelta = MOMENT,
        state: str = "delivered",
    ) -> None:
        """The last look, and what became of it."""
        self.chats.deliver(claim)
        self.settle(claim, waits=waits, takes=takes, state=state)

    def settle(
        self,
        claim: ClaimedSilence,
        *,
        waits: timedelta = timedelta(0),
        takes: timedelta = MOMENT,
        state: str = "delivered",
    ) -> None:
        touch = self.touch(claim)
        at = now() - takes
        decision = "suppress" if state == "suppressed" else "send"
        Touch.objects.filter(pk=touch.pk).update(
            state=state,
            sending_at=at,
            settled_at=at + takes,
            lease_until=None,
            verdicts=[Verdict(at - waits, decision)],
            attempts=[Attempt(1, 1, at, at + takes)] if state == "delivered" else [],
        )

    def count(self) -> None:
        """When what is on its way has settled. Two passes: the first one sets the ceiling."""
        for _ in range(2):
            nudge_stats.count_effects(self.chats.store)

    def tally(self) -> dict[str, tuple[int, int, int]]:
        self.count()
        return {each.policy: (each.sent, each.answered, each.false) for each in nudge_stats.recent_tallies()}


@pytest.fixture
def guide(chats: Chats, matrix: MatrixBuilder, monkeypatch: pytest.MonkeyPatch) -> Guide:
    """Where a test's own transaction stays open, nothing of it would ever be final. A minute is too soon here, so that
    a machine that stops for a second changes nothing."""
    monkeypatch.setattr(nudge_stats, "FALSE_WITHIN", timedelta(seconds=60))
    monkeypatch.setattr(nudge_stats, "SETTLED", timedelta(0))
    # The test's own transaction stays open.
    monkeypatch.setattr(ends, "read_horizon", lambda lag: ends.Horizon(sql.now(), 0, 0))
    guide = Guide(chats, matrix)
    guide.count()
    return guide


@pytest.fixture
def committed(chats: Chats, matrix: MatrixBuilder, monkeypatch: pytest.MonkeyPatch) -> Guide:
    monkeypatch.setattr(nudge_stats, "WRITE_LAG", timedelta(0))
    guide = Guide(chats, matrix)
    guide.count()
    return guide


def test_answer_within_ten_minutes_counts_once(guide: Guide, chats: Chats) -> None:
    guide.send(guide.silence())
    assert guide.tally() == {"default": (1, 0, 0)}
    chats.pass_time(100)
    chats.user(kind="ping")
    chats.user(kind="read")
    chats.user(kind="typing")
    assert guide.tally() == {"default": (1, 0, 0)}
    chats.pass_time(400)
    chats.user()
    chats.user()
    assert guide.tally() == {"default": (1, 1, 0)}
    assert guide.tally() == {"default": (1, 1, 0)}


def test_answer_after_ten_minutes_does_not_count(guide: Guide, chats: Chats) -> None:
    guide.send(guide.silence())
    chats.pass_time(601)
    chats.user()
    assert guide.tally() == {"default": (1, 0, 0)}


@pytest.mark.parametrize(
    "frames",
    [
        [(1.0, "message")], [(1.0, "typing")], [(1.0, "typing"), (5.0, "message")],
        [(0.5, "typing"), (0.5, "message")], [(0.5, "read"), (0.5, "message")],
    ],
)  # fmt: skip
def test_reply_within_two_seconds_counts_as_false(guide: Guide, chats: Chats, frames: list[tuple[float, str]]) -> None:
    guide.send(guide.silence())
    for seconds, kind in frames:
        chats.pass_time(seconds)
        chats.user(kind=kind)
        guide.count()
    assert guide.tally() == {"default": (1, 0, 1)}


def test_false_window_starts_at_delivery(guide: Guide, chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nudge_stats, "FALSE_WITHIN", timedelta(seconds=2))
    for session, after in (("s1", 2_250), ("s2", 2_251)):
        claim = guide.silence(session)
        guide.send(claim, takes=timedelta(milliseconds=250))
        signal = {"e": f"{session}:{claim.armed_at}", "k": "m", "d": after, "f": ""}
        chats.store.server.client.xadd(keys.SIGNALS[keys.shard_of(session)], signal)
    assert guide.tally() == {"default": (2, 1, 1)}


def test_signals_are_timed_from_send(guide: Guide, chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message waited 20 s in the lane of a busy receiver. Its answer came 10 s after it."""
    monkeypatch.setattr(nudge_stats, "FALSE_WITHIN", timedelta(seconds=2))
    guide.send(guide.silence(), waits=timedelta(seconds=20))
    chats.pass_time(10)
    chats.user()
    assert guide.tally() == {"default": (1, 1, 0)}


def test_message_to_typing_user_counts_as_false(guide: Guide, chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "TYPED_LATELY", timedelta(seconds=60))
    chats.policies(new=Policy(timedelta(seconds=5)))
    chats.user(tag="new")
    chats.user(kind="typing")
    chats.pass_time(5.2)
    (claim,) = chats.claim()
    record_events([silence_event(claim, claim.deadline_ms)])
    chats.store.confirm([claim])
    chats.deliver(claim)
    guide.send(claim)
    chats.pass_time(100)
    chats.user()
    assert guide.tally() == {"new": (1, 0, 1)}


def test_delivery_time_does_not_count_as_answer_time(guide: Guide, chats: Chats) -> None:
    guide.send(guide.silence(), takes=timedelta(seconds=300))
    chats.pass_time(200)
    chats.user()
    assert guide.tally() == {"default": (1, 0, 1)}


@pytest.mark.parametrize("state", ["suppressed", "failed", "scheduled", "unknown"])
def test_undelivered_message_does_not_count(guide: Guide, chats: Chats, state: str) -> None:
    guide.send(guide.silence(), state=state)
    chats.pass_time(1)
    chats.user()
    assert guide.tally() == {}


def test_answer_counts_for_latest_message(guide: Guide, chats: Chats) -> None:
    chats.policies(default=Policy(timedelta(seconds=60), max_nudges=2, growth=1))
    first = guide.silence()
    guide.send(first)
    chats.pass_time(61)
    (second,) = chats.claim()
    record_events([silence_event(second, second.deadline_ms)])
    chats.store.confirm([second])
    guide.send(second)
    chats.pass_time(100)
    chats.user()
    assert guide.tally() == {"default": (2, 1, 0)}


def test_answer_skips_stopped_message(guide: Guide, chats: Chats) -> None:
    chats.policies(default=Policy(timedelta(seconds=60), max_nudges=2, growth=1))
    guide.send(guide.silence())
    chats.pass_time(61)
    (second,) = chats.claim()
    record_events([silence_event(second, second.deadline_ms)])
    chats.store.confirm([second])
    chats.deliver(second, sent=False)
    guide.settle(second, state="suppressed")
    chats.pass_time(100)
    chats.user()
    assert guide.tally() == {"default": (1, 1, 0)}


@pytest.mark.parametrize("kinds", [["message"], ["typing"], ["typing", "message"], ["read", "message"]])
def test_reply_before_note_sending_counts_as_false(guide: Guide, chats: Chats, kinds: list[str]) -> None:
    """The last look permitted it, and the user is faster than the mark."""
    claim = guide.silence()
    assert chats.is_current(claim)
    for kind in kinds:
        chats.user(kind=kind)
    chats.note_sending(claim)
    guide.settle(claim)
    assert guide.tally() == {"default": (1, 0, 1)}


def test_answer_without_note_sending_counts(guide: Guide, chats: Chats) -> None:
    claim = guide.silence()
    assert chats.is_current(claim)
    guide.settle(claim)
    chats.pass_time(100)
    chats.user()
    assert guide.tally() == {"default": (1, 1, 0)}


def test_tag_without_policy_counts_as_default(guide: Guide, chats: Chats) -> None:
    chats.policies(vip=Policy(timedelta(seconds=60)))
    for session, tag in (("s1", "vip"), ("s2", "nobody's"), ("s3", "")):
        guide.send(guide.silence(session, tag))
    assert guide.tally() == {"vip": (1, 0, 0), "default": (2, 0, 0)}


def test_message_of_other_node_does_not_count(
    guide: Guide, matrix: MatrixBuilder, record_event: Callable[..., Any]
) -> None:
    matrix.node("usage")
    record_event()
    touch = Touch.objects.exclude(node=guide.node).get()
    Touch.objects.filter(pk=touch.pk).update(
        state="delivered", settled_at=now(), lease_until=None, attempts=[Attempt(1, 1, now(), now())]
    )
    assert guide.tally() == {}


def test_flushed_store_loses_only_uncounted_answers(guide: Guide, chats: Chats) -> None:
    guide.send(guide.silence("s1"))
    guide.send(guide.silence("s2"))
    chats.user("s1")
    assert guide.tally() == {"default": (2, 1, 0)}
    chats.store.server.client.flushall()
    chats.store.push(chats.plan)
    chats.user("s2")
    chats.user("s2", kind="close")
    guide.send(guide.silence("s3"))
    chats.pass_time(100)
    chats.user("s3")
    assert guide.tally() == {"default": (3, 2, 0)}


def test_counted_signals_are_trimmed(guide: Guide, chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = guide.silence()
    guide.send(claim)
    chats.user()
    client = chats.store.server.client
    stream = keys.SIGNALS[keys.shard_of("s1")]
    assert client.xlen(stream) == 1
    pipe = client.pipeline(transaction=False)
    for _ in range(3_000):
        pipe.xadd(stream, {"e": "nobody:1", "k": "m", "d": "5", "f": ""})
    pipe.execute()
    for _ in range(5):
        guide.count()
    assert client.xlen(stream) <= 1
    assert guide.tally() == {"default": (1, 0, 1)}


def test_signal_waits_for_settled_message(guide: Guide, chats: Chats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nudge_stats, "SETTLED", timedelta(seconds=60))
    claim = guide.silence()
    chats.deliver(claim)
    chats.user()
    assert guide.tally() == {}
    guide.settle(claim)
    assert guide.tally() == {"default": (1, 0, 0)}
    monkeypatch.setattr(nudge_stats, "SETTLED", timedelta(0))
    assert guide.tally() == {"default": (1, 0, 1)}


def test_old_tallies_are_deleted(guide: Guide) -> None:
    NudgeTally.objects.create(at=now() - timedelta(days=91), policy="vip", sent=1)
    NudgeTally.objects.create(at=now() - timedelta(days=89), policy="vip", sent=1)
    guide.count()
    assert NudgeTally.objects.count() == 1


def test_restored_dump_continues_counting(guide: Guide, chats: Chats) -> None:
    """Transaction numbers start low again in another cluster."""
    guide.count()
    NudgeMark.objects.update(ceiling_xid=2**60)
    guide.send(guide.silence())
    chats.pass_time(61)
    for _ in range(2):
        guide.count()
    assert guide.tally()["default"][0] == 1


def test_real_delivery_is_counted(guide: Guide, chats: Chats) -> None:
    """By the real clock: what the worker writes is what is counted."""
    chats.policies(default=Policy(timedelta(seconds=2)))
    chats.user("s1")
    chats.user("s2")
    claims: list[ClaimedSilence] = []
    eventually(lambda: claims.extend(chats.claim(lease=timedelta(minutes=10))) or len(claims) == 2)
    record_events([silence_event(each, each.deadline_ms) for each in claims])
    chats.store.confirm(claims)
    back = next(each for each in claims if each.session_id == "s2")
    chats.user("s2")
    deliver([guide.touch(each).pk for each in claims])
    assert {guide.touch(each).state for each in claims if each != back} == {"delivered"}
    assert (guide.touch(back).state, guide.touch(back).reason) == ("suppressed", "answered")
    assert [stats.session_snapshot(chats.store, each).nudges for each in ("s1", "s2")] == [1, 0]
    chats.user("s1", kind="typing")
    chats.user("s1")
    assert guide.tally() == {"default": (1, 0, 1)}


def test_message_stopped_by_guard_uses_no_nudge(guide: Guide, chats: Chats) -> None:
    chats.policies(default=Policy(timedelta(milliseconds=1)))
    chats.user()
    claims: list[ClaimedSilence] = []
    eventually(lambda: claims.extend(chats.claim()) or claims)
    record_events([silence_event(claims[0], claims[0].deadline_ms)])
    chats.store.confirm(claims)
    guide.node.enabled = False
    guide.node.save()
    deliver([guide.touch(claims[0]).pk])
    assert guide.touch(claims[0]).reason == "node_disabled"
    assert stats.session_snapshot(chats.store, "s1").nudges == 0
    assert chats.agent().deadline_ms > 0


@pytest.mark.django_db(transaction=True)
def test_attempt_committed_late_is_counted(committed: Guide) -> None:
    """Its number is below one that is there already."""
    guide = committed
    first, second = guide.silence("s1"), guide.silence("s2")
    written, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        with transaction.atomic():
            guide.send(first)
            written.set()
            assert go_on.wait(WAIT_LIMIT)
        connections.close_all()

    other = threading.Thread(target=slowly)
    other.start()
    try:
        assert written.wait(WAIT_LIMIT)
        guide.send(second)
        assert guide.tally() == {}
    finally:
        go_on.set()
        other.join()
    eventually(lambda: guide.tally() == {"default": (2, 0, 0)})


@pytest.mark.django_db(transaction=True)
def test_concurrent_counts_count_once(committed: Guide) -> None:
    guide = committed
    guide.send(guide.silence())
    with transaction.atomic():
        NudgeMark.objects.select_for_update().get()
        other = threading.Thread(target=lambda: (guide.count(), connections.close_all()))
        other.start()
        other.join(WAIT_LIMIT)
        assert not other.is_alive()
        assert not NudgeTally.objects.exists()
    eventually(lambda: guide.tally() == {"default": (1, 0, 0)})
