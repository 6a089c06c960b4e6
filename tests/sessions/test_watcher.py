"""From a silence in the store to an event of the core."""

import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from django.db import OperationalError, connection, transaction

from scheduling import sql
from scheduling.models import Customer, Event, Touch
from sessions.detection import policies, silence_events, watcher
from sessions.detection.presence import SessionPresence
from sessions.detection.watcher import Watcher
from sessions.frames import Frame
from sessions.models import SilencePolicy
from sessions.rates import Every
from sessions.store import client as keys
from sessions.store import stats
from tests.scheduling.api.serving import database_url
from tests.sessions.test_presence import silence_question
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db


@pytest.fixture
def silence_watcher(chats, matrix, monkeypatch):
    """A watcher of a deployment with a guide message for silent sessions."""
    monkeypatch.setattr(watcher, "close_old_connections", lambda: None)  # the test's transaction lives on it
    monkeypatch.setattr(silence_events, "LONGEST_PASS", 600.0)  # a slow machine also awaits its locks
    free = {f"guard_{each}": "ignore" for each in ("dedupe", "conversation", "quiet_hours")}
    matrix.node("guide", "session.silent", delay=timedelta(0), guard_cap="count_only", **free)
    return Watcher(chats.store, threading.Event())


def make_silences(chats, count=1):
    """Noted in the past, so that they are due by the database's clock as well."""
    chats.pass_time(-70)
    chats.store.note_activity([Frame(f"s{number}", f"user-{number}") for number in range(count)])
    chats.pass_time(70)


def test_watcher_records_event_and_touch_for_silence(chats, silence_watcher):
    noted = chats.user(session="s:1", chat_id="room", tag="vip")
    assert silence_watcher.run_once() > 0
    assert not Event.objects.exists()
    chats.pass_time(61)
    silence_watcher.run_once()
    event = Event.objects.get()
    assert (event.source, event.type, event.user_id, event.chat_id) == ("/sessions", "session.silent", "ann", "room")
    assert event.event_id.startswith("s:1:")
    assert event.occurred_at.timestamp() * 1000 == pytest.approx(noted.deadline_ms, abs=1)
    assert event.data == {
        "chat_id": "room", "session_id": "s:1", "tag": "vip", "tags": ["vip"], "policy": "default", "policy_version": 1,
        "awaited": "customer", "nudge": 1,
    }  # fmt: skip
    assert Touch.objects.get().event == event
    chats.pass_time(3600)
    silence_watcher.run_once()
    assert Event.objects.count() == 1


def test_unconfirmed_silence_is_recorded_once(chats, silence_watcher):
    make_silences(chats, 3)
    claims = chats.store.claim_silent(10, watcher.LEASE)
    silence_events.record_silences(claims.silences, claims.now_ms)  # and there its watcher dies
    chats.pass_time(31)
    silence_watcher.run_once()
    assert Event.objects.count() == Touch.objects.count() == 3
    assert sum(each.in_flight for each in chats.store.shards()) == 0


def test_watcher_records_all_silences_in_batches(chats, silence_watcher, settings):
    settings.AFTERTOUCH_SILENCE_RATE = 100_000
    silence_watcher = Watcher(chats.store, threading.Event())
    make_silences(chats, 1200)
    for _ in range(10):
        silence_watcher.run_once()
    assert Event.objects.count() == 1200


def test_watcher_records_at_most_its_rate(chats, settings, silence_watcher):
    settings.AFTERTOUCH_SILENCE_RATE = 40
    slow = Watcher(chats.store, threading.Event())
    make_silences(chats, 60)
    slow.run_once()
    slow.run_once()
    assert Event.objects.count() < 30


def test_low_rate_reaches_all_shards(chats, settings, silence_watcher):
    settings.AFTERTOUCH_SILENCE_RATE = 20
    slow = Watcher(chats.store, threading.Event())
    shards = set()
    for _ in range(8):
        shards |= set(slow._shards(5))
    assert shards == set(range(keys.SHARDS))


def test_watcher_waits_when_backlog_is_full(chats, silence_watcher, settings, monkeypatch):
    settings.AFTERTOUCH_SILENCE_BACKLOG = 20
    careful = Watcher(chats.store, threading.Event())
    monkeypatch.setattr(careful, "backlog_counts", Every(0))
    make_silences(chats, 100)
    for _ in range(10):
        careful.run_once()
    assert 20 <= Touch.objects.count() <= 20 + keys.SHARDS
    before = Touch.objects.count()
    Touch.objects.filter(state="queued").update(state="delivered", lease_until=None)
    for _ in range(2):
        careful.run_once()
    assert before < Touch.objects.count() <= before + 20 + keys.SHARDS


def test_late_silence_is_recorded_as_stale(chats, silence_watcher):
    chats.user()
    chats.pass_time(60 + 301)
    (claim,) = chats.claim()
    chats.store.release([claim])
    silence_watcher.run_once()
    event = Event.objects.get()
    assert event.data["stale"] is True
    assert SessionPresence(chats.store).presence_blocks([silence_question(claim, Touch.objects.get().planned_at)]) == [
        "stale"
    ]


def test_stopped_watcher_releases_its_claims(chats, silence_watcher):
    make_silences(chats, 3)
    claim_silent = chats.store.claim_silent

    def and_stop(*args):
        silence_watcher.stop.set()
        return claim_silent(*args)

    chats.store.claim_silent = and_stop
    silence_watcher.run()
    assert not Event.objects.exists()
    assert len(claim_silent(10, watcher.LEASE).silences) == 3


def test_database_outage_delays_watcher_and_loses_nothing(chats, silence_watcher, monkeypatch):
    make_silences(chats, 3)

    def away(*_):
        raise OperationalError("gone")

    with monkeypatch.context() as broken:
        broken.setattr(watcher, "record_silences", away)
        pauses = [silence_watcher._pass_safely() for _ in range(6)]
    assert max(pauses) <= 2.0
    assert pauses[-1] > pauses[0]
    silence_watcher._pass_safely()
    assert Event.objects.count() == 3


def test_refused_silence_does_not_block_others(chats, silence_watcher):
    make_silences(chats, 40)
    client = chats.store.server.client
    client.hset(keys.SESSION[keys.shard_of("s7")] + "s7", "u", "x" * 300)
    silence_watcher.run_once()
    assert Event.objects.count() == 39
    assert sum(each.in_flight for each in chats.store.shards()) == 1


def test_watcher_restores_policies_after_flush(chats, silence_watcher, monkeypatch):
    """By the watcher itself, where no frame comes that would bring them."""
    monkeypatch.setattr(silence_watcher, "housekeeping", Every(0))
    SilencePolicy.objects.update_or_create(key="vip", defaults={"threshold": timedelta(seconds=180)})
    chats.store.server.client.flushall()
    assert chats.store.claim_silent(1, watcher.LEASE).versions == {""}
    silence_watcher.run_once()
    assert chats.store.claim_silent(1, watcher.LEASE).versions == {policies.read_policies().version}
    assert chats.seconds_left(chats.user(tag="vip")) == pytest.approx(180, abs=60)  # not 60


def test_watcher_without_readable_policies_pushes_none(chats, silence_watcher, monkeypatch):
    asked = []

    def away():
        asked.append(True)
        raise OperationalError("gone")

    monkeypatch.setattr(policies, "read_policies", away)
    monkeypatch.setattr(silence_watcher, "housekeeping", Every(0))
    make_silences(chats)
    silence_watcher._pass_safely()
    assert Event.objects.count() == 1
    assert chats.store.claim_silent(1, watcher.LEASE).versions == {chats.plan.version}
    chats.store.server.client.delete(*keys.POLICIES)
    silence_watcher._pass_safely()
    assert chats.store.claim_silent(1, watcher.LEASE).versions == {""}
    assert asked == [True, True]


def test_watcher_records_customer_activity(chats, silence_watcher, monkeypatch):
    monkeypatch.setattr(silence_watcher, "housekeeping", Every(0))
    now = chats.now
    Customer.objects.create(user_id="bob", last_active_at=now + timedelta(days=1))
    chats.user(user_id="ann")
    chats.user(session="s2", user_id="bob")
    silence_watcher.run_once()
    ann, bob = Customer.objects.get(user_id="ann"), Customer.objects.get(user_id="bob")
    assert ann.last_active_at is not None
    assert now - timedelta(seconds=2) < ann.last_active_at <= chats.now
    assert bob.last_active_at == now + timedelta(days=1)
    assert chats.store.active_users(100) == {}


def test_latest_activity_in_several_shards_is_stored(chats):
    names = [f"s{number}" for number in range(200)]
    low, high = ([each for each in names if keys.shard_of(each) == shard] for shard in (0, keys.SHARDS - 1))
    chats.user(low[0], user_id="ann")
    chats.user(high[0], user_id="bob")
    chats.pass_time(60)
    later = chats.now
    chats.user(high[1], user_id="ann")
    chats.user(low[1], user_id="bob")
    assert watcher.store_activity(chats.store) == 2
    assert all(each.last_active_at and each.last_active_at >= later for each in Customer.objects.all())


def test_run_once_notes_all_waiting_activity(chats, silence_watcher):
    """Not a batch every two seconds: a morning brings more customers than that."""
    chats.store.note_activity([Frame(f"s{number}", f"user-{number}") for number in range(2000)])
    waits = [len(users) for users in chats.store.active_users(10_000).values()]
    assert sum(waits) == 2000
    for _ in range(1 + -(-max(waits) // (-(-watcher.ACTIVITY_BATCH // keys.SHARDS)))):
        silence_watcher.run_once()
    assert chats.store.active_users(10_000) == {}
    assert Customer.objects.filter(last_active_at__isnull=False).count() == 2000


def await_error(act, started, over):
    """Return the error with which `act` ends once it has `started`. A stall before that ends it by the same limit."""
    while not over.is_set():
        try:
            act()
        except Exception as error:
            if started.is_set():
                return error
        finally:
            connection.close()
    return None


@pytest.mark.django_db(transaction=True)
def test_brief_transaction_of_frozen_watcher_releases_locks(monkeypatch):
    """Its own idle limit ends it, long before the 60 s that other programs may be idle."""
    monkeypatch.setattr(silence_events, "IDLE_MS", 300)
    Customer.objects.create(user_id="ann")
    locked, done = threading.Event(), threading.Event()
    ended = []

    def freeze():
        with silence_events.brief_transaction():
            Customer.objects.select_for_update().get(user_id="ann")
            locked.set()
            done.wait(WAIT_LIMIT)
            Customer.objects.update(name="late")

    frozen = threading.Thread(target=lambda: ended.append(await_error(freeze, locked, done)))
    frozen.start()
    try:
        assert locked.wait(WAIT_LIMIT)
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '50s'")  # below the 60 s of other programs
            Customer.objects.filter(user_id="ann").update(name="first")
    finally:
        done.set()
        frozen.join()
    assert [isinstance(error, sql.UNAVAILABLE_ERRORS) for error in ended] == [True]
    assert Customer.objects.get().name == "first"


@pytest.mark.django_db(transaction=True)
def test_frozen_copy_is_ended_by_another_watcher(chats, silence_watcher, settings, monkeypatch):
    """No time limit of PostgreSQL ends it."""
    monkeypatch.setattr(silence_events, "IDLE_MS", 300)
    settings.TIMEOUTS = replace(settings.TIMEOUTS, event_lock=1.0)
    Customer.objects.create(user_id="user-0")
    make_silences(chats)
    frozen, done = threading.Event(), threading.Event()
    ended = []

    def freeze():
        with silence_events.brief_transaction(), connection.cursor() as cursor:
            Customer.objects.select_for_update().get(user_id="user-0")
            with connection.wrap_database_errors, cursor.copy("COPY scheduling_stage FROM STDIN"):
                frozen.set()
                done.wait(WAIT_LIMIT)

    other = threading.Thread(target=lambda: ended.append(await_error(freeze, frozen, done)))
    other.start()
    try:
        assert frozen.wait(WAIT_LIMIT)
        silence_watcher.run_once()
        assert Event.objects.count() == 1
    finally:
        done.set()
        other.join()
    assert [isinstance(error, sql.UNAVAILABLE_ERRORS) for error in ended] == [True]


def test_watcher_reports_its_state(chats, silence_watcher, monkeypatch):
    monkeypatch.setattr(silence_watcher, "housekeeping", Every(0))
    make_silences(chats, 3)
    silence_watcher.run_once()
    (state,) = stats.running_watchers(chats.store)
    assert (state.handed_in, state.waits) == (3, False)
    assert 9_000 < state.latest_ms < 60_000


@pytest.mark.django_db(transaction=True)
def test_run_once_with_locked_customer_records_others(chats, silence_watcher, settings):
    """The locked one is claimed again after the next housekeeping."""
    settings.TIMEOUTS = replace(settings.TIMEOUTS, event_lock=0.2)
    Customer.objects.create(user_id="user-1")
    make_silences(chats, 3)
    with psycopg.connect(database_url()) as holder:
        holder.execute("SELECT id FROM scheduling_customer FOR UPDATE")
        silence_watcher.run_once()
        assert set(Event.objects.values_list("user_id", flat=True)) == {"user-0", "user-2"}
        holder.rollback()
    silence_watcher.run_once()
    assert Event.objects.count() == Touch.objects.count() == 3


@pytest.mark.django_db(transaction=True)
def test_run_once_with_uncommitted_customer_records_others(chats, silence_watcher, settings):
    """The wait ends by its limit, and no customer is found locked."""
    settings.TIMEOUTS = replace(settings.TIMEOUTS, event_lock=0.2)
    Customer.objects.create(user_id="like")
    make_silences(chats, 5)
    with psycopg.connect(database_url()) as holder:
        columns = ", ".join(
            each.column for each in Customer._meta.concrete_fields if each.column not in ("id", "user_id")
        )
        holder.execute(
            f"INSERT INTO scheduling_customer (user_id, {columns}) "
            f"SELECT 'user-1', {columns} FROM scheduling_customer WHERE user_id = 'like'"
        )
        with suppress(OperationalError):  # its housekeeping, afterwards, waits for the same row
            silence_watcher.run_once()
        assert set(Event.objects.values_list("user_id", flat=True)) == {"user-0", "user-2", "user-3", "user-4"}
        assert sum(each.in_flight + each.armed for each in chats.store.shards()) == 1
        holder.rollback()
