"""Run scripts and commands about live sessions in Redis, and subscribe to key expiry of gateways.

No other module of sessions opens a Redis connection. Raises `StoreUnavailable` for every error that kept the server
from executing a command.
"""

from __future__ import annotations

import hashlib
import time
from binascii import crc32
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.client import Pipeline, PubSub
from redis.exceptions import (
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
    TryAgainError,
)

from scheduling import redis_client

_FOLDER = Path(__file__).resolve().parent.parent / "lua"
_PRELUDE = (_FOLDER / "prelude.lua").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Script:
    name: str
    text: str = field(init=False, repr=False)
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        text = _PRELUDE + (_FOLDER / f"{self.name}.lua").read_text(encoding="utf-8")
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "digest", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


NOTE_ACTIVITY = Script("note_activity")
NOTE_PRESENCE = Script("note_presence")
LAST_MESSAGES = Script("last_messages")
PEEK_SILENT = Script("peek_silent")
CLAIM_SILENT = Script("claim_silent")
CONFIRM = Script("confirm")
RELEASE = Script("release")
STILL_SILENT = Script("still_silent")
NOTE_SENDING = Script("note_sending")
NOTE_EXPIRED = Script("note_expired")
TALLY = Script("tally")
DELETE_PAUSES = Script("delete_pauses")


NO_POLICIES = "NOPOLICIES"
#: Answers of a server that runs but cannot write now: it loads, is full, or is no longer the primary.
UNWRITABLE_ERRORS = (redis.ConnectionError, redis.ReadOnlyError, OutOfMemoryError, TryAgainError, ClusterDownError)
UNWRITABLE_CODES = {"MISCONF", "NOREPLICAS", "BUSY"}  #: disk error, missing replicas, running script

Call = tuple[Script, Sequence[str], Sequence[Any]]  #: a script with its keys and its arguments


class StoreUnavailable(Exception):
    """Redis does not answer or cannot write."""


class NotAllowed(Exception):
    """The Redis ACL denies the command."""


class NoPolicies(Exception):
    """The server has no policies. The calls at `undone` changed nothing."""

    def __init__(self, undone: list[int], answers: list[Any]) -> None:
        super().__init__("the server has no silence policies")
        self.undone = undone
        self.answers = answers


class Server:
    def __init__(self, url: str) -> None:
        self.client = redis_client.connect_redis(url)

    def run(self, calls: Sequence[Call], clock_offset: int = 0) -> list[Any]:
        """Run all calls in one pipeline and return their answers in order.

        A call whose script is unknown to the server changed nothing and is sent again with the script text.

        Raises:
            NoPolicies: the server has no policies for some of the calls.
            StoreAway: the server does not answer; the calls may or may not have run.
        """
        answers = self._send([("EVALSHA", call[0].digest, call) for call in calls], clock_offset)
        unknown = [number for number, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            anew = self._send([("EVAL", calls[number][0].text, calls[number]) for number in unknown], clock_offset)
            for number, answer in zip(unknown, anew, strict=True):
                answers[number] = answer
        undone = [number for number, answer in enumerate(answers) if _lacks_policies(answer)]
        _raise_first([answer for number, answer in enumerate(answers) if number not in undone])
        if undone:
            raise NoPolicies(undone, answers)
        return answers

    def _send(self, calls: Sequence[tuple[str, str, Call]], clock_offset: int) -> list[Any]:
        def fill(pipe: Pipeline) -> None:
            for verb, script, (_, names, words) in calls:
                pipe.execute_command(verb, script, len(names), *names, clock_offset, *words)  # type: ignore[no-untyped-call]

        return self._execute(fill)

    def ask(self, fill: Callable[[Pipeline], object]) -> list[Any]:
        """Return the answers to the commands that `fill` writes into a pipeline. Raises `StoreUnavailable`."""
        answers = self._execute(fill)
        _raise_first(answers)
        return answers

    def _execute(self, fill: Callable[[Pipeline], object]) -> list[Any]:
        with raise_unavailable(), self.client.pipeline(transaction=False) as pipe:
            fill(pipe)
            return pipe.execute(raise_on_error=False)

    # --- keys of a gateway ----------------------------------------------------------------------------------------

    def keyspace_events(self) -> str | None:
        """Return the value of `notify-keyspace-events`, or None where CONFIG is not permitted."""
        try:
            with raise_unavailable():
                found = self.client.config_get("notify-keyspace-events")
        except ResponseError:
            return None
        return str(next((decode_text(value) for value in found.values()), ""))

    @contextmanager
    def subscribe_to_expiry(self) -> Iterator[ExpirySubscription]:
        """Subscribe to key expiry in this database.

        Raises:
            NotAllowed: the ACL denies the channel.
        """
        with raise_unavailable(), closing(self.client.pubsub()) as line:  # type: ignore[no-untyped-call]
            database = self.client.connection_pool.connection_kwargs.get("db") or 0
            channel = f"__keyevent@{database}__:expired"
            try:
                line.subscribe(channel)
                listener = ExpirySubscription(line)
            except NoPermissionError as error:
                raise NotAllowed(f"SUBSCRIBE {channel}") from error
            yield listener

    def receives_expiry(self, key: str, within: float) -> bool | None:
        """Write `key` with a lifetime of 1 ms and return whether its expiry event arrives.

        `within` is in seconds. Returns None where the ACL denies the write.
        """
        with self.subscribe_to_expiry() as listener, raise_unavailable():
            try:
                self.client.set(key, "1", px=1)
            except NoPermissionError:
                return None
            ends_at = time.monotonic() + within
            while time.monotonic() < ends_at:
                self.client.get(key)  # a read makes the server expire the key
                if listener.key(0.05) == key:
                    return True
        return False


class ExpirySubscription:
    """Receive expiry events. Pings the server, because a TCP connection can be dead without an error."""

    ASKED_EVERY, DEAD_AFTER = 5.0, 15.0  # seconds

    def __init__(self, line: PubSub) -> None:
        self._line = line
        self._asked_at = self._heard_at = time.monotonic()
        self.key(5.0)  # the first message confirms the subscription

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


@contextmanager
def raise_unavailable() -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError) as error:
        if isinstance(error, (redis.TimeoutError, OSError)) or _cannot_write(error):
            raise StoreUnavailable(str(error)) from error
        raise


def _raise_first(answers: Sequence[Any]) -> None:
    """Raise `StoreUnavailable` for an answer of a server that cannot write now. Raise other errors unchanged: they are
    defects.
    """
    for answer in answers:
        if _cannot_write(answer):
            raise StoreUnavailable(str(answer)) from answer
        if isinstance(answer, Exception):
            raise answer


def _cannot_write(answer: Any) -> bool:
    return isinstance(answer, UNWRITABLE_ERRORS) or (
        isinstance(answer, ResponseError) and str(answer).partition(" ")[0] in UNWRITABLE_CODES
    )


def _lacks_policies(answer: Any) -> bool:
    return isinstance(answer, ResponseError) and NO_POLICIES in str(answer)


def decode_text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


SHARDS = 16


def shard_of(text: str) -> int:
    return crc32(text.encode()) % SHARDS


def _shard_keys(suffix: str, kind: str = "s") -> tuple[str, ...]:
    return tuple(f"{{at:{kind}{shard:02}}}:{suffix}" for shard in range(SHARDS))


DUE = _shard_keys("due")
INFLIGHT = _shard_keys("inflight")
POLICIES = _shard_keys("policies")
ACTIVE = _shard_keys("active")
PAUSED = _shard_keys("paused")
COUNTS = _shard_keys("counts")
SIGNS = _shard_keys("signs")
SESSION = _shard_keys("s:")  #: followed by the session id
#: Followed by the user id: time of the user's last message, ms, as 6 bytes, then the session of the last frame.
PRESENCE = _shard_keys("", "u")
WATCHERS = "{at:watch}"  #: hash: the state of each watcher
SILENCES = "{at:watch}:silences"  #: hash: number of recorded silences by tag
