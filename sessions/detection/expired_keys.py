"""Convert expired keys of a gateway into silences of the store.

Redis does not queue expiry events: an event without a listener is lost. An event may arrive seconds late, because
Redis expires a key on access or in a sampling sweep. A received event is kept until the store has recorded it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from uuid import uuid4

import structlog
from django.conf import settings

from scheduling.errors import InvalidInput
from scheduling.ids import find_user_id_problem
from sessions.frames import check_id
from sessions.rates import Backoff
from sessions.store.client import NotAllowed, Server, StoreUnavailable
from sessions.store.sessions import Store

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


def find_returned_keys(keys: Sequence[str]) -> set[str]:
    """Return the keys that exist again. Raises `StoreUnavailable`."""
    if not keys:
        return set()
    found = gateway_server().ask(lambda pipe: [pipe.exists(key) for key in keys])
    return {key for key, exists in zip(keys, found, strict=True) if exists}


BATCH = 500
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
        self._received: list[tuple[str, str]] = []  #: not yet recorded in the store
        self._backoff = Backoff(0.2, 30.0)
        self._thread = threading.Thread(target=self.run, name="listen-expired", daemon=True)

    def check(self) -> None:
        """Check that the server publishes expiry events.

        Raises:
            KeyspaceEventsDisabled: the server does not publish them, or the ACL denies the channel.
            StoreUnavailable: the server does not answer.
        """
        try:
            with self.gateway.subscribe_to_expiry():
                flags = self.gateway.keyspace_events()
            if flags is None:
                self._probe()
        except NotAllowed as error:
            raise _explain_denial(error) from error
        for each in flags or ():
            if "E" not in each or not {"x", "A"} & set(each):
                raise KeyspaceEventsDisabled(
                    f"notify-keyspace-events is “{each}” and must have E and x. {HOW_TO_CONFIGURE}"
                )

    def _probe(self) -> None:
        """Let a key expire and wait for its event. Used where CONFIG is not permitted, as recommended."""
        received = self.gateway.receives_expiry(f"{{at:watch}}:probe:{uuid4().hex}", PROBE_WITHIN)
        if received is None:
            log.warning("keyspace_events_unknown", reason="neither CONFIG GET nor a key of its own is allowed")
        elif not received:
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

    def _wait(self, error: StoreUnavailable) -> None:
        pause = self._backoff.next()
        log.warning("gateway_unavailable", error=str(error), again_in=round(pause, 1))
        self.stop.wait(pause)

    def _listen(self) -> None:
        with self.gateway.subscribe_to_expiry() as listener:
            self.connected.set()
            self._note()
            while not self.stop.is_set():
                self._receive_key(listener.key(LISTEN_SECONDS))
                while self._received and len(self._received) < BATCH and (key := listener.key(0)):
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
                self._received.append((user_id, key))

    def _note(self) -> None:
        """Record received keys in the store. A key stays queued until the store has it."""
        while self._received:
            self.store.note_expired(self._received[:BATCH], window=self.window, tag=self.tag)
            del self._received[:BATCH]
