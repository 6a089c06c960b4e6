"""Convert expired keys of a gateway into silences of the store.

Redis does not queue expiry events: an event without a listener is lost. An event may arrive seconds late, because
Redis expires a key on access or in a sampling sweep. A received event is kept until the store has recorded it. The
store may be another server: while it is unavailable, the listener goes on.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import islice
from typing import Any
from uuid import uuid4

import redis
import structlog
from django.conf import settings
from redis.client import PubSub
from redis.exceptions import NoPermissionError, ResponseError

from scheduling.errors import InvalidInput
from scheduling.ids import find_user_id_problem
from sessions.frames import check_id
from sessions.rates import Backoff
from sessions.store.client import Server, StoreUnavailable, decode_text, raise_unavailable
from sessions.store.sessions import ExpiredKey, Store

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Pattern:
    """A key pattern such as `session:*`; the star is the user id. Raises `ValueError` unless it has one star."""

    text: str

    def __post_init__(self) -> None:
        if self.text.count("*") != 1 or any(sign in self.text for sign in "?[]\\"):
            raise ValueError(f"“{self.text}” must have one * in the place of the user, and no other wildcard")

    def user_of(self, key: str) -> str | None:
        before, after = self.text.split("*")
        if len(key) <= len(before) + len(after) or not key.startswith(before) or not key.endswith(after):
            return None
        return key[len(before) : len(key) - len(after)]


def gateway_server() -> Server:
    """Return the server of the gateways' keys: `AFTERTOUCH_GATEWAY_REDIS_URL`, by default `REDIS_URL`."""
    return _connect_server(settings.AFTERTOUCH_GATEWAY_REDIS_URL or settings.REDIS_URL)


@cache
def _connect_server(url: str) -> Server:
    return Server(url)


class NotAllowed(Exception):
    """The Redis ACL denies the command."""


class ExpirySubscriptions:
    """Receive expiry events of the database of all servers of a gateway, until `close`.

    A server of several that is unavailable is tried again every second.

    Raises:
        NotAllowed: the ACL denies the channel.
        StoreUnavailable: no server answers.
    """

    LOOKED_EVERY, SLICE = 1.0, 0.02  # seconds

    def __init__(self, gateway: Server) -> None:
        self._gateway = gateway
        self._lines: dict[str, ExpirySubscription] = {}
        self._looked_at = 0.0
        self._follow_servers()

    def key(self, timeout: float) -> str | None:
        """Return the next expired key, or None after `timeout` seconds. Raises `StoreUnavailable` without a server."""
        ends_at, wait = time.monotonic() + timeout, 0.0
        while True:
            self._follow_servers()
            if len(self._lines) == 1:
                wait = timeout
            for name, line in list(self._lines.items()):
                try:
                    found = line.key(wait)
                except StoreUnavailable:
                    self._drop_line(name)
                else:
                    if found is not None:
                        return found
            if time.monotonic() >= ends_at:
                return None
            wait = self.SLICE

    def close(self) -> None:
        for name in list(self._lines):
            self._drop_line(name)

    def _follow_servers(self) -> None:
        if self._lines and time.monotonic() - self._looked_at < self.LOOKED_EVERY:
            return
        self._looked_at = time.monotonic()
        with raise_unavailable():
            servers = self._gateway.servers()
        for name in self._lines.keys() - servers.keys():
            self._drop_line(name)
        failure = None
        for name in servers.keys() - self._lines.keys():
            try:
                self._lines[name] = ExpirySubscription(servers[name])
            except StoreUnavailable as error:
                failure = error
        if failure and not self._lines:
            raise failure

    def _drop_line(self, name: str) -> None:
        with suppress(redis.RedisError, OSError):
            self._lines.pop(name).close()


class ExpirySubscription:
    """Receive expiry events of one server. Pings it, because a TCP connection can be dead without an error."""

    ASKED_EVERY, DEAD_AFTER = 5.0, 15.0  # seconds

    def __init__(self, server: redis.Redis) -> None:
        self._line: PubSub = server.pubsub()  # type: ignore[no-untyped-call]
        self.close = self._line.close
        self._asked_at = self._heard_at = time.monotonic()
        channel = f"__keyevent@{server.connection_pool.connection_kwargs.get('db') or 0}__:expired"
        try:
            with raise_unavailable():
                self._line.subscribe(channel)
            self.key(5.0)  # the first message confirms the subscription
        except NoPermissionError as error:
            self.close()
            raise NotAllowed(f"SUBSCRIBE {channel}") from error
        except StoreUnavailable:
            self.close()
            raise

    def key(self, timeout: float) -> str | None:
        """Return the next expired key, or None after `timeout` seconds. Raises `StoreUnavailable`."""
        with raise_unavailable():
            now = time.monotonic()
            if now - self._asked_at > self.ASKED_EVERY:
                self._asked_at = now
                self._line.ping()
            message = self._line.get_message(timeout=timeout)
        if message:
            self._heard_at = now
        elif now - self._heard_at > self.DEAD_AFTER:
            raise StoreUnavailable("the line is dead")
        return decode_text(message["data"]) if message and message["type"] == "message" else None


def find_returned_keys(keys: Sequence[str]) -> set[str]:
    """Return the keys that exist again. Raises `StoreUnavailable`."""
    if not keys:
        return set()
    found = gateway_server().ask(lambda pipe: [pipe.exists(key) for key in keys])
    return {key for key, exists in zip(keys, found, strict=True) if exists}


BATCH = 500
MOST_KEPT = 100_000  #: users whose expiry waits for the store; the oldest are dropped
LISTEN_SECONDS = 0.5  #: seconds to wait for the first key of a batch
PROBE_WITHIN = 5.0  #: seconds
HOW_TO_CONFIGURE = "Set it in the server's configuration file, or with CONFIG SET notify-keyspace-events Ex."


class KeyspaceEventsDisabled(Exception):
    """The server does not publish expiry events."""


def _explain_denial(error: NotAllowed) -> KeyspaceEventsDisabled:
    return KeyspaceEventsDisabled(
        f"The Redis user may not do “{error}”. Grant it the channel in the server's ACL: &__keyevent@*__:expired"
        " (deploy/redis/users.acl has a user for this program)."
    )


class ExpiredKeyListener:
    """Listen in one thread. Call `check` first: a server without expiry events causes no error while listening."""

    def __init__(
        self, gateway: Server, store: Store, pattern: Pattern, *, tag: str, window: timedelta, stop: threading.Event
    ) -> None:
        self.gateway = gateway
        self.store = store
        self.pattern = pattern
        self.tag = tag
        self.window = window
        self.stop = stop
        self.connected = threading.Event()
        self.failure: KeyspaceEventsDisabled | None = None  #: reason of the final stop; `stop` is then set
        #: The last key of each user and when it expired, by the monotonic clock; not yet recorded in the store.
        self._received: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._dropped = 0  #: of these, beyond `MOST_KEPT`, since the start
        self._note_at = 0.0  #: the store failed; not before this time of the monotonic clock
        self._backoff, self._store_backoff = Backoff(0.2, 30.0), Backoff(0.2, 30.0)
        self._thread = threading.Thread(target=self.run, name="listen-expired", daemon=True)

    def check(self) -> None:
        """Check that the server publishes expiry events.

        Raises:
            KeyspaceEventsDisabled: the server does not publish them, or the ACL denies the channel.
            StoreUnavailable: the server does not answer.
        """
        try:
            with closing(ExpirySubscriptions(self.gateway)) as events:
                flags = self._read_flags()
                if flags is None:
                    self._probe(events)
        except NotAllowed as error:
            raise _explain_denial(error) from error
        for each in flags or ():
            if "E" not in each or not {"x", "A"} & set(each):
                raise KeyspaceEventsDisabled(
                    f"notify-keyspace-events is “{each}” and must have E and x. {HOW_TO_CONFIGURE}"
                )

    def _read_flags(self) -> list[str] | None:
        """Return the value of `notify-keyspace-events` of each server, or None where CONFIG is not permitted."""
        try:
            with raise_unavailable():
                found: list[Any] = [
                    each.config_get("notify-keyspace-events") for each in self.gateway.servers().values()
                ]
        except ResponseError:
            return None
        return [str(next((decode_text(value) for value in each.values()), "")) for each in found]

    def _probe(self, events: ExpirySubscriptions) -> None:
        """Let a key expire and wait for its event. Used where CONFIG is not permitted, as recommended."""
        key = f"{{at:watch}}:probe:{uuid4().hex}"
        with raise_unavailable():
            try:
                self.gateway.client.set(key, "1", px=1)
            except NoPermissionError:
                log.warning("keyspace_events_unknown", reason="neither CONFIG GET nor a key of its own is allowed")
                return
            ends_at = time.monotonic() + PROBE_WITHIN
            while time.monotonic() < ends_at:
                self.gateway.client.get(key)  # a read makes the server expire the key
                if events.key(0.05) == key:
                    return
        raise KeyspaceEventsDisabled(
            f"The server published no expiry event within {PROBE_WITHIN:.0f} s: notify-keyspace-events must"
            f" have E and x. {HOW_TO_CONFIGURE}"
        )

    def await_check(self) -> None:
        """Repeat `check` until the server answers or `stop` is set. Raises `KeyspaceEventsDisabled`."""
        while not self.stop.is_set():
            try:
                self.check()
            except StoreUnavailable as error:
                self._wait(error)
            else:
                self._backoff.reset()
                return

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                self._listen()
            except StoreUnavailable as error:
                self.connected.clear()
                self._wait(error)
            except NotAllowed as error:
                # A retry cannot succeed. A process that continued would look alive and receive nothing.
                self.connected.clear()
                self.failure = _explain_denial(error)
                self.stop.set()
            except Exception:
                # The end of a thread is not visible, and its process would look alive and receive nothing.
                self.connected.clear()
                log.exception("listening_failed")
                self.stop.wait(self._backoff.next())
        self._note_at = 0.0  # a last attempt
        self._note()
        if lost := self._dropped + len(self._received):
            log.error("expiries_lost", count=lost)

    def _wait(self, error: StoreUnavailable) -> None:
        self._note()  # the store may be there, while only the gateway is away
        pause = self._backoff.next()
        log.warning("gateway_unavailable", error=str(error), again_in=round(pause, 1))
        self.stop.wait(pause)

    def _listen(self) -> None:
        with closing(ExpirySubscriptions(self.gateway)) as events:
            self.connected.set()
            while not self.stop.is_set():
                self._receive_key(events.key(LISTEN_SECONDS))
                while self._received and len(self._received) < BATCH and (key := events.key(0)):
                    self._receive_key(key)
                self._note()
                self._backoff.reset()

    def _receive_key(self, key: str | None) -> None:
        user_id = self.pattern.user_of(key) if key else None
        if key and user_id:
            try:
                check_id(user_id)
                if problem := find_user_id_problem(user_id):
                    raise InvalidInput.of("user_id", problem)
            except InvalidInput as error:
                log.warning("expired_key_skipped", key=key[:200], error=str(error))
            else:
                self._received[user_id] = key, time.monotonic()
                self._received.move_to_end(user_id)
                if len(self._received) > MOST_KEPT:
                    self._received.popitem(last=False)
                    self._dropped += 1

    def _note(self) -> None:
        """Record received keys in the store. A key stays queued until the store has it."""
        while self._received and (now := time.monotonic()) >= self._note_at:
            batch = [
                ExpiredKey(user_id, key, timedelta(seconds=now - at))
                for user_id, (key, at) in islice(self._received.items(), BATCH)
            ]
            try:
                self.store.note_expired(batch, window=self.window, tag=self.tag)
            except Exception as error:
                pause = self._store_backoff.next()
                self._note_at = time.monotonic() + pause
                log.warning(
                    "expiries_not_noted", error=str(error), waiting=len(self._received), dropped=self._dropped,
                    again_in=round(pause, 1), exc_info=not isinstance(error, StoreUnavailable),
                )  # fmt: skip
            else:
                self._store_backoff.reset()
                for each in batch:
                    del self._received[each.user_id]
