"""The adapter for gateways that keep a key with a time to live for each user."""

import re
import threading
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO

import pytest
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import CommandError
from redis.exceptions import ResponseError

from config.environment import ROOT
from config.local.processes import wait_until
from sessions.detection import expired_keys
from sessions.detection.expired_keys import ExpiredKeyListener, KeyspaceEventsDisabled, Pattern
from sessions.detection.presence import SessionPresence
from sessions.policy import Policy
from sessions.rates import Backoff
from sessions.store.client import Server, StoreUnavailable
from sessions.store.sessions import ExpiredKey
from tests.sessions.refusing_server import refuse_writes
from tests.sessions.test_presence import silence_question
from tests.support.tables import each_row
from tests.support.waiting import WAIT_LIMIT

SECOND = timedelta(seconds=1)
LONG = timedelta(minutes=10)  #: longer than a slow machine stalls, so that nothing is found twice


@pytest.fixture
def keyspace_events(valkey):
    """A server with notifications of expired keys, as a gateway's."""
    before = valkey.config_get("notify-keyspace-events")["notify-keyspace-events"]
    valkey.config_set("notify-keyspace-events", "Ex")
    yield
    valkey.config_set("notify-keyspace-events", before)


@pytest.fixture
def run_listener(chats, keyspace_events):
    @contextmanager
    def run_listener(pattern="session:*", **changes):
        stop = threading.Event()
        gateway = Server(settings.REDIS_URL)
        options = {"tag": "", "window": LONG, "stop": stop, **changes}
        listener = ExpiredKeyListener(gateway, chats.store, Pattern(pattern), **options)
        listener.check()
        listener.start()
        try:
            assert listener.connected.wait(WAIT_LIMIT)
            yield listener
        finally:
            stop.set()
            listener.join()
            gateway.client.close()

    return run_listener


def expire(chats, key):
    """As if the user's last ping had been a while ago. To look at it makes the server notice."""
    client = chats.store.server.client
    client.set(key, "1", px=1)
    assert wait_until(lambda: not client.exists(key), WAIT_LIMIT)


def claim_until(chats, count):
    found = []

    def enough():
        found.extend(chats.claim(lease=LONG))
        return len(found) >= count

    assert wait_until(enough, WAIT_LIMIT)
    return found


def test_expired_key_becomes_silence_of_its_user(chats, run_listener):
    with run_listener(tag="gateway"):
        for other in ("other:ann", "session:", "session:" + "x" * 300):
            expire(chats, other)
        expire(chats, "session:ann")
        (claim,) = claim_until(chats, 1)
    assert (claim.session_id, claim.user_id, claim.tag, claim.nudge) == ("ann", "ann", "gateway", 1)
    assert abs(claim.deadline - chats.now) < LONG


def test_many_listeners_record_one_silence_for_each_key(chats, run_listener):
    with run_listener(), run_listener(), run_listener():
        for user in range(20):
            expire(chats, f"session:u{user}")
        claims = claim_until(chats, 20)
    assert len(claims) == len({claim.user_id for claim in claims}) == 20
    assert chats.claim() == []


def test_note_expired_repeats_only_after_window(chats):
    def expired():
        return chats.store.note_expired([ExpiredKey("ann", "session:ann")], window=30 * SECOND)

    assert [expired(), expired()] == [1, 0]
    (first,) = chats.claim()
    chats.store.confirm([first])
    chats.pass_time(29)
    assert expired() == 0
    chats.pass_time(2)
    assert expired() == 1
    (second,) = chats.claim()
    assert second.armed_at > first.armed_at


def test_note_expired_ignores_session_with_frames(chats):
    chats.user(session="ann")
    assert chats.store.note_expired([ExpiredKey("ann", "session:ann")], window=30 * SECOND) == 0
    assert chats.claim() == []


def test_expired_key_silence_has_no_further_nudges(chats):
    chats.policies(default=Policy(60 * SECOND, max_nudges=3))
    chats.store.note_expired([ExpiredKey("ann", "session:ann")], window=30 * SECOND)
    chats.store.confirm(chats.claim())
    chats.pass_time(3600)
    assert chats.claim() == []


def test_user_with_new_key_counts_as_answered(chats):
    chats.store.note_expired([ExpiredKey("ann", "session:ann"), ExpiredKey("bob", "session:bob")], window=30 * SECOND)
    claims = sorted(chats.claim(), key=lambda claim: claim.user_id)
    chats.store.confirm(claims)
    chats.store.server.client.set("session:ann", "1", px=60_000)
    assert SessionPresence(chats.store).presence_blocks([silence_question(claim) for claim in claims]) == [
        "answered",
        "",
    ]


def test_expired_key_during_store_outage_is_noted_later(chats, run_listener, monkeypatch):
    """It may be another server than the gateway's. A listener that ends its subscription loses expiries."""
    note, asked, is_back = chats.store.note_expired, threading.Event(), threading.Event()
    errors = iter([StoreUnavailable("gone"), ResponseError("NOPERM"), RuntimeError("odd")])

    def away(*args, **changes):
        if error := next(errors, None):
            raise error
        asked.set()
        if not is_back.is_set():
            raise StoreUnavailable("gone")
        return note(*args, **changes)

    monkeypatch.setattr(chats.store, "note_expired", away)
    with run_listener():
        expire(chats, "session:ann")
        assert asked.wait(WAIT_LIMIT)
        for user in ("bob", "cid"):
            expire(chats, f"session:{user}")
        is_back.set()
        assert {claim.user_id for claim in claim_until(chats, 3)} == {"ann", "bob", "cid"}


@pytest.mark.parametrize("is_back", [True, False])
def test_stopped_listener_records_the_newest_expiries_or_names_the_loss(
    chats, run_listener, monkeypatch, read_log, is_back
):
    def away(*_, **__):
        raise StoreUnavailable("gone")

    monkeypatch.setattr(expired_keys, "MOST_KEPT", 2)
    monkeypatch.setattr(Backoff, "next", lambda _: 3600.0)  # only the stop asks again
    with run_listener() as listener, monkeypatch.context() as outage:
        outage.setattr(chats.store, "note_expired", away)
        for user in ("ann", "bob", "cid"):
            expire(chats, f"session:{user}")
        assert wait_until(lambda: "cid" in listener._received, WAIT_LIMIT)
        if is_back:
            outage.undo()
        listener.stop.set()
        listener.join()
    assert {claim.user_id for claim in chats.claim()} == ({"bob", "cid"} if is_back else set())
    lost = 1 if is_back else 3  # ann had no room
    assert f'{{"count": {lost}, "event": "expiries_lost"' in read_log()


def test_late_record_counts_from_the_expiry(chats):
    """So it is too late for a guide message after `AFTERTOUCH_SILENCE_STALE`, and other listeners add none."""

    def expired(age):
        return chats.store.note_expired([ExpiredKey("ann", "session:ann", age * SECOND)], window=30 * SECOND)

    assert expired(60) == 1
    (late,) = chats.claim()
    assert late.armed == late.deadline == pytest.approx(chats.now - 60 * SECOND, abs=10 * SECOND)
    chats.store.confirm([late])
    assert [expired(age) for age in (70, 60, 50, 20)] == [0, 0, 0, 1]


def test_listener_survives_full_server(chats, valkey, run_listener, read_log):
    """It answers with an error, which is no lost connection. A process whose listener ended would look alive."""
    with run_listener():
        valkey.set("session:ann", "1")
        with refuse_writes(valkey):
            valkey.pexpire("session:ann", 1)
            assert wait_until(lambda: not valkey.exists("session:ann"), WAIT_LIMIT)
            assert wait_until(lambda: "expiries_not_noted" in read_log(), WAIT_LIMIT)
        assert [claim.user_id for claim in claim_until(chats, 1)] == ["ann"]


def test_disconnected_listener_subscribes_again(chats, run_listener):
    client = chats.store.server.client

    def ears():
        return {each["id"] for each in client.client_list(_type="pubsub")}

    others = ears()  # of tests before, whose end the server has not seen yet
    with run_listener():
        (first,) = ears() - others
        client.client_kill_filter(_id=first)
        assert wait_until(lambda: bool(ears() - others - {first}), WAIT_LIMIT)
        expire(chats, "session:ann")
        claim_until(chats, 1)


def test_listen_expired_needs_keyspace_events(chats, valkey):
    for flags in ("Ex", "EA", "KEA"):
        valkey.config_set("notify-keyspace-events", flags)
        listener_on(chats.store.server, chats).check()
    for flags in ("", "Kx", "Eg", "E"):
        valkey.config_set("notify-keyspace-events", flags)
        with pytest.raises(CommandError, match="CONFIG SET notify-keyspace-events Ex"):
            call_command("listen_expired", "--pattern", "session:*", stdout=StringIO())
    valkey.config_set("notify-keyspace-events", "")


@pytest.fixture
def as_user(valkey):
    """Connect as a user with these rights."""
    made = []

    def as_user(rights):
        valkey.execute_command("ACL", "SETUSER", "probe", "reset", "on", ">s3cret", *rights.split())
        made.append(Server(re.sub(r"//(.*@)?", "//probe:s3cret@", settings.REDIS_URL)))
        return made[-1]

    yield as_user
    for each in made:
        each.client.close()
    valkey.execute_command("ACL", "DELUSER", "probe")


def shipped_rights(user):
    lines = (ROOT / "deploy" / "redis" / "users.acl").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"user {user} ")]
    return line.partition(">PASSWORD ")[2]


def listener_on(gateway, chats, stop=None):
    options = {"tag": "", "window": SECOND, "stop": stop or threading.Event()}
    return ExpiredKeyListener(gateway, chats.store, Pattern("session:*"), **options)


def test_listener_works_with_shipped_acl(chats, keyspace_events, valkey, as_user, monkeypatch):
    monkeypatch.setattr(expired_keys, "PROBE_WITHIN", WAIT_LIMIT)
    gateway = as_user(shipped_rights("listener"))
    valkey.execute_command("ACL", "LOG", "RESET")
    stop = threading.Event()
    listener = listener_on(gateway, chats, stop)
    listener.check()
    listener.start()
    try:
        assert listener.connected.wait(WAIT_LIMIT)
        expire(chats, "session:ann")
        assert [claim.user_id for claim in claim_until(chats, 1)] == ["ann"]
    finally:
        stop.set()
        listener.join()
    denied = {(row["reason"], row["object"]) for row in valkey.acl_log() if row["username"] == "probe"}
    assert denied <= {("command", "config|get")}


def test_check_without_config_right_detects_disabled_events(chats, valkey, as_user, monkeypatch):
    monkeypatch.setattr(expired_keys, "PROBE_WITHIN", 1.0)
    valkey.config_set("notify-keyspace-events", "")
    with pytest.raises(KeyspaceEventsDisabled, match="must have E and x"):
        listener_on(as_user(shipped_rights("listener")), chats).check()


def test_listener_without_subscribe_right_fails(chats, keyspace_events, as_user):
    stop = threading.Event()
    listener = listener_on(as_user(shipped_rights("watcher")), chats, stop)
    with pytest.raises(KeyspaceEventsDisabled, match="SUBSCRIBE __keyevent@"):
        listener.check()
    listener.start()
    assert stop.wait(WAIT_LIMIT)
    listener.join()
    assert "&__keyevent@*__:expired" in str(listener.failure)


@each_row(
    "words, said",
    [
        *((["--pattern", odd], "--pattern: .* must have one \\*") for odd in ("session", "*:*", "s?:*", "[ab]:*")),
        (["--pattern", "s:*", "--window", "soon"], "--window: “soon” is not a duration"),
        (["--pattern", "s:*", "--tag", "a\nb"], "--tag: must have at most 64 characters"),
        (["--pattern", "s:*", "--tag", "x" * 65], "--tag: must have at most 64 characters"),
    ],
)
def test_listen_expired_explains_an_unfit_option(words, said):
    with pytest.raises(CommandError, match=said):
        call_command("listen_expired", *words)


def test_pattern_extracts_user_from_key():
    pattern = Pattern("at:*:live")
    assert pattern.user_of("at:ann:live") == "ann"
    assert pattern.user_of("at:a:b:live") == "a:b"
    assert [pattern.user_of(key) for key in ("at::live", "at:live", "xat:ann:live", "at:ann:lives")] == [None] * 4
