"""Run scripts and commands about live sessions in Redis, and subscribe to key expiry of gateways.

No other module of sessions opens a Redis connection. Raises `StoreUnavailable` for every error that kept the server
from executing a command.
"""

from __future__ import annotations

import time
from binascii import crc32, crc_hqx
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import redis
from redis.client import Pipeline, PubSub
from redis.exceptions import (
    AskError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
    TryAgainError,
)

from scheduling import redis_client
from scheduling.redis_client import Script
from scheduling.server_addresses import is_cluster
from sessions.store import cluster

_FOLDER = Path(__file__).resolve().parent.parent / "lua"


def read_script(name: str) -> Script:
    return Script(_FOLDER / "prelude.lua", _FOLDER / f"{name}.lua")


NOTE_ACTIVITY = read_script("note_activity")
NOTE_PRESENCE = read_script("note_presence")
LAST_MESSAGES = read_script("last_messages")
PEEK_SILENT = read_script("peek_silent")
CLAIM_SILENT = read_script("claim_silent")
CONFIRM = read_script("confirm")
RELEASE = read_script("release")
FIND_ARMED = read_script("find_armed")
REARM = read_script("rearm")
STILL_SILENT = read_script("still_silent")
NOTE_SENDING = read_script("note_sending")
NOTE_EXPIRED = read_script("note_expired")
TALLY = read_script("tally")
DELETE_PAUSES = read_script("delete_pauses")


NO_POLICIES = "NOPOLICIES"
#: Answers of a server that runs but cannot write now: it loads, is full, or is no longer the primary.
UNWRITABLE_ERRORS = (
    redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, OutOfMemoryError, TryAgainError, AskError,
    ClusterDownError,
)  # fmt: skip
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
    """A Redis, directly or by Sentinel, or a Redis Cluster (`redis+cluster://…`)."""

    def __init__(self, url: str) -> None:
        self.client: Any = cluster.ClusterClient(url) if is_cluster(url) else redis_client.connect_redis(url)

    def run(self, calls: Sequence[Call], clock_offset: int = 0, *, partly: bool = False) -> list[Any]:
        """Run all calls in one pipeline and return their answers in order.

        A call whose script is unknown to the server changed nothing and is sent again with the script text.

        Args:
            partly: the answer of a call whose node is unavailable is None, unless no node answers.

        Raises:
            NoPolicies: the server has no policies for some of the calls.
            StoreUnavailable: the server does not answer; the calls may or may not have run.
        """
        answers = self._send([("EVALSHA", call[0].sha, call) for call in calls], clock_offset)
        unknown = [number for number, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            anew = self._send([("EVAL", calls[number][0].text, calls[number]) for number in unknown], clock_offset)
            for number, answer in zip(unknown, anew, strict=True):
                answers[number] = answer
        undone = [
            number
            for number, answer in enumerate(answers)
            if isinstance(answer, ResponseError) and NO_POLICIES in str(answer)
        ]
        if partly:
            _leave_out_unavailable(answers)
        raise_first_error([answer for number, answer in enumerate(answers) if number not in undone])
        if undone:
            raise NoPolicies(undone, answers)
        return answers

    def _send(self, calls: Sequence[tuple[str, str, Call]], clock_offset: int) -> list[Any]:
        def fill(pipe: Pipeline) -> None:
            for verb, script, (_, names, words) in calls:
                pipe.execute_command(verb, script, len(names), *names, clock_offset, *words)  # type: ignore[no-untyped-call]

        return self._execute(fill)

    def ask(self, fill: Callable[[Pipeline], object], *, partly: bool = False) -> list[Any]:
        """Return the answers to the commands that `fill` writes into a pipeline. Raises `StoreUnavailable`.

        For `partly` see `run`.
        """
        answers = self._execute(fill)
        if partly:
            _leave_out_unavailable(answers)
        raise_first_error(answers)
        return answers

    def _execute(self, fill: Callable[[Pipeline], object]) -> list[Any]:
        with raise_unavailable(), self.client.pipeline(transaction=False) as pipe:
            fill(pipe)
            answers: list[Any] = pipe.execute(raise_on_error=False)
            return answers

    # --- keys of a gateway ----------------------------------------------------------------------------------------

    def servers(self) -> dict[str, redis.Redis]:
        """Return the servers that publish expiry events, by name: this one, or the primaries of the cluster."""
        return self.client.primaries() if isinstance(self.client, cluster.ClusterClient) else {"": self.client}

    def keyspace_events(self) -> list[str] | None:
        """Return the value of `notify-keyspace-events` of each server, or None where CONFIG is not permitted."""
        try:
            with raise_unavailable():
                found: list[Any] = [each.config_get("notify-keyspace-events") for each in self.servers().values()]
        except ResponseError:
            return None
        return [str(next((decode_text(value) for value in each.values()), "")) for each in found]

    @contextmanager
    def subscribe_to_expiry(self) -> Iterator[ExpirySubscriptions]:
        """Subscribe to key expiry in this database.

        Raises:
            NotAllowed: the ACL denies the channel.
        """
        with closing(ExpirySubscriptions(self.servers)) as listener:
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


class ExpirySubscriptions:
    """Receive expiry events of all servers. A server of several that is unavailable is tried again every second."""

    LOOKED_EVERY, SLICE = 1.0, 0.02  # seconds

    def __init__(self, servers: Callable[[], dict[str, redis.Redis]]) -> None:
        self._servers = servers
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
            servers = self._servers()
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


@contextmanager
def raise_unavailable() -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError) as error:
        if isinstance(error, (redis.TimeoutError, OSError)) or _cannot_write(error):
            raise StoreUnavailable(str(error)) from error
        raise


def _leave_out_unavailable(answers: list[Any]) -> None:
    """Replace answers of nodes that cannot write now by None, unless all are."""
    unavailable = [number for number, answer in enumerate(answers) if _cannot_write(answer)]
    for number in unavailable if len(unavailable) < len(answers) else ():
        answers[number] = None


def raise_first_error(answers: Sequence[Any]) -> None:
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


def decode_text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


SHARDS = 16
_SLOTS = 16_384  #: of a cluster


def shard_of(text: str) -> int:
    return crc32(text.encode()) % SHARDS


def _find_tags(kind: str) -> tuple[str, ...]:
    """Return a hash tag for each shard, in its own sixteenth of the slots: nodes then have equal numbers of shards."""
    found: dict[int, str] = {}
    for letters in product(digits + ascii_lowercase, repeat=2):
        tag = f"at:{kind}{''.join(letters)}"
        found.setdefault(crc_hqx(tag.encode(), 0) % _SLOTS * SHARDS // _SLOTS, tag)
    return tuple(f"{{{found[shard]}}}:" for shard in range(SHARDS))


SHARD, _USERS = _find_tags("s"), _find_tags("u")  #: prefix of the keys of each shard


def _shard_keys(suffix: str) -> tuple[str, ...]:
    return tuple(prefix + suffix for prefix in SHARD)


DUE = _shard_keys("due")
INFLIGHT = _shard_keys("inflight")
POLICIES = _shard_keys("policies")
ACTIVE = _shard_keys("active")
PAUSED = _shard_keys("paused")
COUNTS = _shard_keys("counts")
IDLE = _shard_keys("idle")  #: sorted set: the latest sessions without a timer (see `lua/prelude.lua`)
SIGNS = _shard_keys("signs")
REVOKED = _shard_keys("revoked")  #: sorted set (see `lua/revoke.lua`)
PAUSES = _shard_keys("pauses:")  #: followed by the day
SESSION = _shard_keys("s:")  #: followed by the session id
#: Followed by the user id: time of the user's last message, ms, as 6 bytes, then the session of the last frame.
PRESENCE = _USERS
WATCHERS = "{at:watch}"  #: hash: the state of each watcher
SILENCES = "{at:watch}:silences"  #: hash: number of recorded silences by policy
