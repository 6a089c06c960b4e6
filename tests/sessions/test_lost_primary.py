"""A lost primary of the cluster stops the work for its own shards only."""

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from scheduling import sql
from scheduling.channels.base import Delivered, Unknown
from scheduling.delivery.presence import PresenceQuestion
from scheduling.models import Customer, Event
from sessions import tokens
from sessions.detection import watcher
from sessions.detection.policies import current_policies
from sessions.detection.presence import SessionPresence
from sessions.detection.watcher import Watcher
from sessions.frames import Frame
from sessions.models import Campaign
from sessions.policy import PolicySet
from sessions.rates import Every
from sessions.store import client, stats
from sessions.store.client import Server, StoreUnavailable
from sessions.store.inbox import Post
from sessions.store.sessions import Store
from sessions.websocket.connection import FrameRequest, write_frames
from tests.sessions.redis_cluster import SLOTS
from tests.sessions.test_cluster import slot_of
from tests.sessions.websocket.test_inapp_channel import message, send


class LostPrimary:
    """A store on the cluster, one of whose primaries is skipped like a node that did not answer."""

    def __init__(self, cluster, store, monkeypatch):
        self.store, self._patch = store, monkeypatch
        nodes = {third: cluster.owner_of(third * SLOTS // 3).port for third in range(3)}
        self._owners = [nodes[slot_of(prefix) * 3 // SLOTS] for prefix in client.SHARD]
        self._users = [nodes[slot_of(prefix) * 3 // SLOTS] for prefix in client.PRESENCE]
        # Another one has the watchers' reports.
        self.port = next(each for each in self._owners if each != nodes[slot_of(client.WATCHERS) * 3 // SLOTS])

    def lose(self):
        self._patch.setitem(self.store.server.client._skipped, f"127.0.0.1:{self.port}", time.monotonic() + 3600)

    def holds(self, session):
        return self._owners[client.shard_of(session)] == self.port

    def holds_user(self, user):
        return self._users[client.shard_of(user)] == self.port

    def return_all(self):
        self._patch.undo()


@pytest.fixture
def lost_primary(cluster):
    store = Store(Server(cluster.url), current_policies)
    store.server.client.flushall()
    with pytest.MonkeyPatch.context() as patch:
        yield LostPrimary(cluster, store, patch)
    store.server.client.flushall()
    store.server.client.close()


@pytest.mark.django_db
def test_watcher_serves_shards_of_other_primaries(lost_primary, matrix, monkeypatch):
    monkeypatch.setattr(watcher, "close_old_connections", lambda: None)  # the test's transaction lives on it
    matrix.node("guide", "session.silent", delay=timedelta(0))
    store = lost_primary.store
    users = [f"user-{number}" for number in range(60)]
    sessions = [f"lost-{number}" for number in range(60)]
    store.clock_offset = -100_000_000
    store.note_activity([Frame(*each) for each in zip(sessions[:30], users[:30], strict=True)])
    store.clock_offset = 0
    store.note_activity([Frame(*each) for each in zip(sessions[30:], users[30:], strict=True)])
    saved = sql.now() - timedelta(minutes=3)
    Campaign.objects.create(
        key="sale", starts_at=saved, ends_at=saved + timedelta(hours=1), threshold=timedelta(minutes=30)
    )
    lost_primary.lose()
    own = Watcher(store, threading.Event())
    monkeypatch.setattr(own, "housekeeping", Every(0))
    for _ in range(5):
        own.run_once()
    healthy = {each for each in sessions if not lost_primary.holds(each)}
    assert {each.rpartition(":")[0] for each in Event.objects.values_list("event_id", flat=True)} == {
        each for each in sessions[:30] if each in healthy
    }
    seen = Customer.objects.filter(last_active_at__isnull=False).values_list("user_id", flat=True)
    assert {each.replace("user", "lost") for each in seen} >= healthy
    assert [each.handed_in for each in stats.running_watchers(store)] == [Event.objects.count()]
    lost_primary.return_all()
    for session in healthy & set(sessions[30:]):
        found = stats.session_snapshot(store, session)
        assert found.deadline
        assert found.deadline - found.now > timedelta(minutes=25)
    for _ in range(5):
        own.run_once()
    assert Event.objects.count() == 30


def test_claim_with_all_silences_on_lost_primary_returns_the_other_shards(lost_primary, monkeypatch):
    """The primary is lost between the two steps of a claim."""
    store = lost_primary.store
    store.policies = lambda: PolicySet({})
    session = next(each for each in map(str, range(1000)) if lost_primary.holds(each))
    store.clock_offset = -100_000_000
    store.note_activity([Frame(session, "ann")])
    store.clock_offset = 0
    run = store.server.run

    def lose_after_peek(*words, **more):
        answers = run(*words, **more)
        lost_primary.lose()
        return answers

    monkeypatch.setattr(store.server, "run", lose_after_peek)
    claimed = store.claim_silent(10, timedelta(seconds=30))
    assert (claimed.silences, len(claimed.versions)) == ([], 1)


def test_presence_is_unknown_only_on_lost_primary(lost_primary):
    store = lost_primary.store
    store.policies = lambda: PolicySet({})
    people = [f"user-{number}" for number in range(40)]
    store.note_activity([Frame(each.replace("user", "lost"), each) for each in people])
    sessions = [each.replace("user", "lost") for each in people]
    armed = [each.armed_at for each in stats.session_snapshots(store, sessions)]
    lost_primary.lose()
    before = datetime.fromtimestamp(0, UTC)
    live = SessionPresence(store)
    others = [PresenceQuestion(each, "", "order.paid", "", before) for each in people]
    assert [each == "presence_unknown" for each in live.presence_blocks(others)] == [
        lost_primary.holds_user(each) for each in people
    ]
    silences = [
        PresenceQuestion(user, "", "session.silent", f"{session}:{at}", datetime.now(UTC))
        for session, at, user in zip(sessions, armed, people, strict=True)
    ]
    assert [each == "presence_unknown" for each in live.presence_blocks(silences)] == [
        lost_primary.holds(each) for each in sessions
    ]


def test_only_message_of_batch_on_lost_primary_fails_alone(lost_primary):
    store = lost_primary.store
    store.policies = lambda: PolicySet({})
    ids = [str(number) for number in range(1000)]
    user = next(each for each in ids if not lost_primary.holds_user(each))
    lost, healthy = (next(each for each in ids if lost_primary.holds(each) is away) for away in (True, False))
    slips = [
        FrameRequest(Frame(lost, user), Post(lost, "m1", "user", "hi")),
        FrameRequest(Frame(lost, user, kind="ping")),
        FrameRequest(Frame(healthy, user, kind="ping")),
    ]
    lost_primary.lose()
    results = write_frames(store, slips)
    assert [isinstance(each, StoreUnavailable) for each in results] == [True, True, False]


def test_inapp_messages_of_lost_primary_fail_alone(lost_primary, monkeypatch):
    """With an address, the session's node decides. Without one, the node of the user's presence decides too."""
    store = lost_primary.store
    store.policies = lambda: PolicySet({})
    monkeypatch.setattr("sessions.store.sessions.live_store", lambda: store)
    people = [f"user-{number}" for number in range(40)]
    sessions = [each.replace("user", "lost") for each in people]
    store.note_activity([Frame(*each) for each in zip(sessions, people, strict=True)])
    lost_primary.lose()
    pairs = [*zip(people, sessions, strict=True)]
    outcomes = send(
        *(message(user, target={"address": session}) for user, session in pairs), *(message(user) for user in people)
    )
    away = [lost_primary.holds(session) for session in sessions]
    away += [lost_primary.holds_user(user) or lost_primary.holds(session) for user, session in pairs]
    assert [isinstance(each, Unknown) for each in outcomes] == away
    assert all(isinstance(each, Delivered | Unknown) for each in outcomes)
    lost, found = (people[away.index(is_away, 40) - 40] for is_away in (True, False))
    user = next(each for each in people if lost_primary.holds_user(each))
    addressed = message(found, target={"address": found.replace("user", "lost")})
    # The only message without an address has its user on the lost node; then a user without a chat.
    assert [type(each) for each in send(message(user), addressed)] == [Unknown, Delivered]
    assert [type(each) for each in send(message(lost), message(found), message("none"))][:2] == [Unknown, Delivered]


def test_revocations_of_lost_primary_fail_alone(lost_primary):
    server = lost_primary.store.server
    sessions = [f"lost-{number}" for number in range(40)]
    lost_primary.lose()
    for session in sessions:
        if lost_primary.holds(session):
            with pytest.raises(StoreUnavailable):
                tokens.read_issue_time(server, session)
        else:
            at = tokens.revoke_tokens(server, session, ["user"])
            assert tokens.is_revoked(server, session, "user", at - 1)
    found = tokens.list_revocations(server, [0] * client.SHARDS)
    listed = {each.session_id for shard in found for each in shard}
    assert listed == {each for each in sessions if not lost_primary.holds(each)}
