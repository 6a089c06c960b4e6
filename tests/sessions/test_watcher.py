"""From a silence in the store to an event of the core."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError

from scheduling.models import Customer, Event, Touch
from sessions import hand_in, keys, policies, reports, watcher
from sessions.frames import Frame
from sessions.models import SilencePolicy
from sessions.pace import Every
from sessions.policy_set import PolicySet
from sessions.presence import Live
from sessions.watcher import Watcher
from tests.sessions.conftest import Chats
from tests.sessions.test_presence import about

pytestmark = pytest.mark.django_db


@pytest.fixture
def watch(chats: Chats, matrix: Any, monkeypatch: pytest.MonkeyPatch) -> Watcher:
    """One whose house has a guide message for silent sessions."""
    monkeypatch.setattr(watcher, "close_old_connections", lambda: None)  # the test's transaction lives on it
    free = {f"guard_{each}": "ignore" for each in ("dedupe", "conversation", "quiet_hours")}
    matrix.node("guide", "session.silent", delay=timedelta(0), guard_cap="count_only", **free)
    return Watcher(chats.store, threading.Event())


def silences(chats: Chats, count: int = 1) -> None:
    """Noted in the past, so that they are due by the database's clock as well."""
    chats.pass_time(-70)
    chats.store.note_activity([Frame(f"s{number}", f"user-{number}") for number in range(count)])
    chats.pass_time(70)


def test_a_silence_becomes_an_event_and_a_touch(chats: Chats, watch: Watcher) -> None:
    noted = chats.user(session="s:1", chat_id="room", tag="vip")
    assert watch.run_once() > 0
    assert not Event.objects.exists()
    chats.pass_time(61)
    watch.run_once()
    event = Event.objects.get()
    assert (event.source, event.type, event.user_id, event.chat_id) == ("/sessions", "session.silent", "ann", "room")
    assert event.event_id.startswith("s:1:")
    assert event.occurred_at.timestamp() * 1000 == pytest.approx(noted.deadline_ms, abs=1)
    assert event.data == {"chat_id": "room", "session_id": "s:1", "tag": "vip", "nudge": 1}
    assert Touch.objects.get().event == event
    chats.pass_time(3600)
    watch.run_once()
    assert Event.objects.count() == 1


def test_what_was_recorded_and_not_confirmed_is_not_recorded_twice(chats: Chats, watch: Watcher) -> None:
    silences(chats, 3)
    claims = chats.store.claim_silent(10, watcher.LEASE)
    hand_in.hand_in(claims.silences, claims.now_ms)  # and there its watcher dies
    chats.pass_time(31)
    watch.run_once()
    assert Event.objects.count() == Touch.objects.count() == 3
    assert sum(each.in_flight for each in chats.store.shards()) == 0


def test_many_go_in_batches_until_there_are_no_more(chats: Chats, watch: Watcher, settings: Any) -> None:
    settings.AFTERTOUCH_SILENCE_RATE = 100_000
    watch = Watcher(chats.store, threading.Event())
    silences(chats, 1200)
    for _ in range(10):
        watch.run_once()
    assert Event.objects.count() == 1200


def test_no_more_than_the_rate_go_at_once(chats: Chats, settings: Any, watch: Watcher) -> None:
    settings.AFTERTOUCH_SILENCE_RATE = 40
    slow = Watcher(chats.store, threading.Event())
    silences(chats, 60)
    slow.run_once()
    slow.run_once()
    assert Event.objects.count() < 30


def test_a_rate_below_the_number_of_shards_reaches_all_of_them(chats: Chats, settings: Any, watch: Watcher) -> None:
    settings.AFTERTOUCH_SILENCE_RATE = 20
    slow = Watcher(chats.store, threading.Event())
    shards: set[int] = set()
    for _ in range(8):
        shards |= set(slow._shards(5))
    assert shards == set(range(keys.SHARDS))


def test_it_waits_while_too_much_is_undelivered(
    chats: Chats, watch: Watcher, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AFTERTOUCH_SILENCE_BACKLOG = 20
    careful = Watcher(chats.store, threading.Event())
    monkeypatch.setattr(careful, "_counting", Every(0))
    silences(chats, 100)
    for _ in range(10):
        careful.run_once()
    assert 20 <= Touch.objects.count() <= 20 + keys.SHARDS
    before = Touch.objects.count()
    Touch.objects.filter(state="queued").update(state="delivered", lease_until=None)
    for _ in range(2):
        careful.run_once()
    assert before < Touch.objects.count() <= before + 20 + keys.SHARDS


def test_a_silence_that_was_found_too_late_is_recorded_and_not_said(chats: Chats, watch: Watcher) -> None:
    chats.user()
    chats.pass_time(60 + 301)
    (claim,) = chats.claim()
    chats.store.release([claim])
    watch.run_once()
    event = Event.objects.get()
    assert event.data["stale"] is True
    assert Live(chats.store).objections([about(claim, Touch.objects.get().planned_at)]) == ["stale"]


def test_what_it_holds_when_it_is_stopped_goes_back_at_once(chats: Chats, watch: Watcher) -> None:
    silences(chats, 3)
    claim_silent = chats.store.claim_silent

    def and_stop(*args: Any) -> Any:
        watch.stop.set()
        return claim_silent(*args)

    chats.store.claim_silent = and_stop  # type: ignore[method-assign]
    watch.run()
    assert not Event.objects.exists()
    assert len(claim_silent(10, watcher.LEASE).silences) == 3


def test_a_database_that_is_away_costs_nothing_but_time(
    chats: Chats, watch: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    silences(chats, 3)

    def away(*_: Any) -> Any:
        raise OperationalError("gone")

    with monkeypatch.context() as broken:
        broken.setattr(watcher, "hand_in", away)
        pauses = [watch._pass_safely() for _ in range(6)]
    assert max(pauses) <= 2.0
    assert pauses[-1] > pauses[0]
    watch._pass_safely()
    assert Event.objects.count() == 3


def test_a_silence_that_the_database_refuses_holds_up_no_other(chats: Chats, watch: Watcher) -> None:
    silences(chats, 40)
    client = chats.store.server.client
    client.hset(keys.SESSION[keys.shard_of("s7")] + "s7", "u", "x" * 300)
    watch.run_once()
    assert Event.objects.count() == 39
    assert sum(each.in_flight for each in chats.store.shards()) == 1


def test_policies_come_back_after_a_flush(chats: Chats, watch: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_housekeeping", Every(0))
    SilencePolicy.objects.update_or_create(tag="vip", defaults={"threshold": timedelta(seconds=180)})
    chats.store.server.client.flushall()
    watch.run_once()
    watch.run_once()
    assert chats.store.claim_silent(1, watcher.LEASE).versions == {policies.read().version}


def test_a_watcher_that_cannot_read_policies_pushes_none(
    chats: Chats, watch: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> PolicySet:
        raise OperationalError("gone")

    monkeypatch.setattr(policies, "read", away)
    watch._pass_safely()
    assert chats.store.claim_silent(1, watcher.LEASE).versions == {chats.plan.version}


def test_activity_reaches_customers(chats: Chats, watch: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_housekeeping", Every(0))
    now = chats.now
    Customer.objects.create(user_id="bob", last_active_at=now + timedelta(days=1))
    chats.user(user_id="ann")
    chats.user(session="s2", user_id="bob")
    watch.run_once()
    ann, bob = Customer.objects.get(user_id="ann"), Customer.objects.get(user_id="bob")
    assert ann.last_active_at is not None
    assert now - timedelta(seconds=2) < ann.last_active_at <= chats.now
    assert bob.last_active_at == now + timedelta(days=1)
    assert chats.store.active_users(100) == {}


def test_it_says_how_it_is(chats: Chats, watch: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_housekeeping", Every(0))
    silences(chats, 3)
    watch.run_once()
    (state,) = reports.watchers(chats.store)
    assert (state.handed_in, state.waits) == (3, False)
    assert 9_000 < state.latest_ms < 60_000
