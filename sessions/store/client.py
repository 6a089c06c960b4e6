"""Run scripts and commands about live sessions in Redis or on the nodes of a Redis Cluster."""

from __future__ import annotations

import threading
import time
from binascii import crc32, crc_hqx
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count, product
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    RedisClusterException,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from scheduling import redis_client
from scheduling.redis_client import Script
from scheduling.server_addresses import is_cluster, parse_redis

# Send commands about live sessions to the nodes of a Redis Cluster.
#
# `redis.cluster` finds the nodes and keeps their connections. Its pipeline is not used: while one primary is
# unreachable it fails the commands of all nodes, and it repeats commands one at a time.


REFRESHED_EVERY = 0.2  #: seconds between two readings of the cluster's nodes, at least
SKIPPED_FOR = 0.5  #: seconds in which the commands of a node that did not answer fail at once
TRY_AGAIN_AFTER = 0.02  #: seconds; a slot with several keys is locked while it moves

Command = tuple[Sequence[Any], dict[str, Any]]  #: words, and options of its answer's parser


class ClusterClient:
    """Send each command to the primary of its key. One error does not affect the commands of other nodes.

    Connects with the first command. Redirected commands are repeated for `TIMEOUTS.redis` seconds: they had no effect.
    Others are repeated once after a broken connection and never after a timeout.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._cluster: RedisCluster | None = None
        self._refreshed_at = 0.0
        self._skipped: dict[str, float] = {}  #: by name of a node, until when

    def __getattr__(self, name: str) -> Any:
        """Return a command of `RedisCluster`."""
        return getattr(self.cluster, name)

    @property
    def cluster(self) -> RedisCluster:
        """Return the connected client. Raises `redis.ConnectionError`."""
        with self._lock:
            if self._cluster is None:
                self._cluster = _connect_cluster(self._url)
            return self._cluster

    def pipeline(self, transaction: bool = False) -> ClusterBatch:
        return ClusterBatch(self)

    def primaries(self) -> dict[str, redis.Redis]:
        """Return the clients of the nodes that take writes, by host and port."""
        self._refresh("")
        nodes: list[ClusterNode] = self.cluster.nodes_manager.get_nodes_by_server_type("primary")
        return {node.name: self.cluster.get_redis_connection(node) for node in nodes}

    def close(self) -> None:
        with self._lock:
            cluster, self._cluster = self._cluster, None
        if cluster:
            cluster.close()

    def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Return the answers in order. An error is the answer of its command."""
        answers: list[Any] = [None] * len(commands)
        slots, asked, resent = find_slots(commands), dict[int, ClusterNode](), set[int]()
        waiting: Sequence[int] = range(len(commands))
        ends_at = time.monotonic() + settings.TIMEOUTS.redis
        for attempt in count():
            self._send(self._by_node(waiting, slots, asked, answers), commands, answers, asked)
            failed = [number for number in waiting if isinstance(answers[number], redis.RedisError)]
            asked = self._follow_redirections(failed, answers)
            broken = [n for n in failed if isinstance(answers[n], redis.ConnectionError) and n not in resent]
            resent.update(broken)
            split = [number for number in failed if isinstance(answers[number], TryAgainError)]
            moved = [number for number in failed if isinstance(answers[number], MovedError)]
            waiting = sorted({*asked, *broken, *split, *moved})
            if not waiting or time.monotonic() > ends_at:
                break
            if split or attempt:  # the nodes may not agree yet
                time.sleep(TRY_AGAIN_AFTER)
        return answers

    def _by_node(
        self, numbers: Iterable[int], slots: Sequence[int], asked: Mapping[int, ClusterNode], answers: list[Any]
    ) -> dict[str, tuple[ClusterNode, list[int]]]:
        groups: dict[str, tuple[ClusterNode, list[int]]] = {}
        manager = self.cluster.nodes_manager
        for number in numbers:
            try:
                node = asked.get(number) or manager.get_node_from_slot(slots[number])
            except RedisClusterException as error:
                self._refresh("")
                answers[number] = ClusterDownError(str(error))
            else:
                groups.setdefault(node.name, (node, []))[1].append(number)
        return groups

    def _send(
        self,
        groups: Mapping[str, tuple[ClusterNode, list[int]]],
        commands: Sequence[Command],
        answers: list[Any],
        asked: Mapping[int, ClusterNode],
    ) -> None:
        """Send to all nodes, then read from all. The nodes work at the same time."""
        exchanges = []
        try:
            for node, numbers in groups.values():
                exchange = _Exchange(self.cluster.get_redis_connection(node), node.name, numbers)
                exchanges.append(exchange)
                if self._skipped.get(node.name, 0) > time.monotonic():
                    exchange.failure = redis.ConnectionError(f"{node.name} did not answer")
                else:
                    exchange.send(commands, asked)
            for exchange in exchanges:
                exchange.read(commands, asked, answers)
        finally:
            for exchange in exchanges:
                exchange.end()
        for exchange in exchanges:
            if exchange.failure:
                if exchange.unreachable and self._skipped.get(exchange.name, 0) < time.monotonic():
                    self._skipped[exchange.name] = time.monotonic() + SKIPPED_FOR
                self._refresh(exchange.name)

    def _follow_redirections(self, failed: Iterable[int], answers: Sequence[Any]) -> dict[int, ClusterNode]:
        """Note slots that moved. Return the node to ask for each command whose slot is moving."""
        asked = {}
        for number in failed:
            error = answers[number]
            if isinstance(error, MovedError):
                try:
                    self.cluster.nodes_manager.move_slot(error)
                except LookupError:  # no node had the slot
                    self._refresh("")
            elif isinstance(error, AskError):
                known = self.cluster.nodes_manager.get_node(error.host, error.port)
                asked[number] = known or _make_node(error.host, error.port)
        return asked

    def _refresh(self, failed: str) -> None:
        """Read the nodes again, the failed one last. Keep the known ones if none answers."""
        cluster = self.cluster
        with self._lock:
            if time.monotonic() - self._refreshed_at < REFRESHED_EVERY:
                return
            self._refreshed_at = time.monotonic()
        try:
            cluster.nodes_manager.initialize(last_failed_node_name=failed or None)
        except (RedisClusterException, redis.RedisError, OSError, LookupError):
            # The nodes may have new addresses. Those of the setting are asked next.
            self.close()


class ClusterBatch(Pipeline):
    """Collect commands for `ClusterClient.execute`."""

    def __init__(self, client: ClusterClient) -> None:
        super().__init__(None, {}, False, None)  # type: ignore[arg-type]
        self._client = client

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self.command_stack = self.command_stack, []
        answers = self._client.execute(commands)
        for answer in answers if raise_on_error else ():
            if isinstance(answer, Exception):
                raise answer
        return answers


class _Exchange:
    """Commands to one node and their answers. `failure` is the answer of all that have none."""

    def __init__(self, client: redis.Redis, name: str, numbers: Sequence[int]) -> None:
        self.name = name
        self.failure: Exception | None = None
        self.unreachable = False  #: it did not accept the connection, or did not answer in time
        self._client = client
        self._numbers = numbers
        self._connection: Any = None
        self._unread = False

    def send(self, commands: Sequence[Command], asked: Mapping[int, ClusterNode]) -> None:
        words: list[Sequence[Any]] = []
        for number in self._numbers:
            if number in asked:
                words.append(("ASKING",))
            words.append(commands[number][0])
        try:
            self._connection = self._client.connection_pool.get_connection()
            self._unread = True
            self._connection.send_packed_command(self._connection.pack_commands(words))
        except (redis.RedisError, OSError) as error:
            self._fail(error)

    def read(self, commands: Sequence[Command], asked: Mapping[int, ClusterNode], answers: list[Any]) -> None:
        for number in self._numbers:
            if not self.failure:
                try:
                    if number in asked:
                        self._client.parse_response(self._connection, "ASKING")  # type: ignore[no-untyped-call]
                    answers[number] = self._parse(*commands[number])
                except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                    self._fail(error)
            if self.failure:
                answers[number] = self.failure
        self._unread = bool(self.failure)

    def _parse(self, words: Sequence[Any], options: Mapping[str, Any]) -> Any:
        try:
            return self._client.parse_response(self._connection, words[0], **options)  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            return error

    def _fail(self, error: Exception) -> None:
        self.failure = error if isinstance(error, redis.RedisError) else redis.ConnectionError(str(error))
        self.unreachable = self._connection is None or isinstance(error, redis.TimeoutError)

    def end(self) -> None:
        if self._connection is None:
            return
        if self._unread:
            self._connection.disconnect()
        self._client.connection_pool.release(self._connection)


def _connect_cluster(url: str) -> RedisCluster:
    address = parse_redis(url)
    timeout = settings.TIMEOUTS.redis
    options: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout, **address.options}
    try:
        return RedisCluster(
            startup_nodes=[_make_node(host, port) for host, port in address.hosts],
            require_full_coverage=False,
            retry=Retry(NoBackoff(), len(address.hosts)),  # of its own commands, at another node each
            **options,
        )
    except (RedisClusterException, LookupError) as error:
        raise redis.ConnectionError(str(error)) from error


def _make_node(host: str, port: int) -> ClusterNode:
    return ClusterNode(host, port)  # type: ignore[no-untyped-call]


def find_slots(commands: Sequence[Command]) -> list[int]:
    """Return the slot of each command's first key. A command without a key goes with the first that has one."""
    slots: list[int | None] = []
    for words, _ in commands:
        key = next(iter(words[3 if words[0] in ("EVALSHA", "EVAL") else 1 :]), None)
        slots.append(None if key is None else key_slot(key if isinstance(key, bytes) else str(key).encode()))
    first = next((slot for slot in slots if slot is not None), 0)
    return [first if slot is None else slot for slot in slots]


# Run scripts and commands about live sessions in Redis. Raises `StoreUnavailable` for every error that kept the server
# from executing a command.


_FOLDER = Path(__file__).resolve().parent.parent / "lua"
#: By name. Read at the start: a process that read them later would mix those of two releases during a deployment.
SCRIPTS = {file.stem: Script(_FOLDER / "prelude.lua", file) for file in _FOLDER.glob("*.lua") if file.stem != "prelude"}

NO_POLICIES = object()  #: the answer of a call that changed nothing, because the server has no policies
#: Answers of a server that runs but cannot write now: it loads, is full, or is no longer the primary.
UNWRITABLE_ERRORS = (
    redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, OutOfMemoryError, TryAgainError, AskError,
    ClusterDownError,
)  # fmt: skip
UNWRITABLE_CODES = {"MISCONF", "NOREPLICAS", "BUSY"}  #: disk error, missing replicas, running script

Call = tuple[str, Sequence[str], Sequence[Any]]  #: name of a script of `lua/`, keys, arguments


class StoreUnavailable(Exception):
    """Redis does not answer or cannot write."""


class Server:
    """A Redis, directly or by Sentinel, or a Redis Cluster (`redis+cluster://…`)."""

    scripts: Mapping[str, Script] = SCRIPTS

    def __init__(self, url: str) -> None:
        self.client: Any = ClusterClient(url) if is_cluster(url) else redis_client.connect_redis(url)

    def run(self, calls: Sequence[Call], clock_offset: int = 0, *, partly: bool = False) -> list[Any]:
        """Run all calls in one pipeline and return their answers in order.

        A call whose script is unknown to the server changed nothing and is sent again with the script text. The answer
        of one that needs policies may be `NO_POLICIES`.

        Args:
            partly: the answer of a call whose node is unavailable is None, unless no node answers.

        Raises:
            StoreUnavailable: the server does not answer; the calls may or may not have run.
        """
        answers = self._send(calls, clock_offset)
        unknown = [number for number, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            anew = self._send([calls[number] for number in unknown], clock_offset, with_text=True)
            for number, answer in zip(unknown, anew, strict=True):
                answers[number] = answer
        for number, answer in enumerate(answers):
            if isinstance(answer, ResponseError) and "NOPOLICIES" in str(answer):
                answers[number] = NO_POLICIES
        if partly:
            _leave_out_unavailable(answers)
        raise_first_error(answers)
        return answers

    def _send(self, calls: Sequence[Call], clock_offset: int, *, with_text: bool = False) -> list[Any]:
        def fill(pipe: Pipeline) -> None:
            for name, keys, words in calls:
                script = self.scripts[name]
                verb, text = ("EVAL", script.text) if with_text else ("EVALSHA", script.sha)
                pipe.execute_command(verb, text, len(keys), *keys, clock_offset, *words)  # type: ignore[no-untyped-call]

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

    def servers(self) -> dict[str, redis.Redis]:
        """Return the servers that publish expiry events, by name: this one, or the primaries of the cluster."""
        return self.client.primaries() if isinstance(self.client, ClusterClient) else {"": self.client}


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


def to_milliseconds(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def instant_of_ms(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


SHARDS = 16
_SLOTS = 16_384  #: of a cluster


def shard_of(text: str) -> int:
    return crc32(text.encode()) % SHARDS


def by_shard(ids: Sequence[str]) -> dict[int, list[int]]:
    """Group positions of the ids by shard. The order within a shard is kept."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(ids):
        groups[shard_of(each)].append(number)
    return groups


def _find_tags(kind: str) -> tuple[str, ...]:
    """Return a hash tag for each shard, in its own sixteenth of the slots: nodes then have equal numbers of shards."""
    found: dict[int, str] = {}
    for letters in product(digits + ascii_lowercase, repeat=2):
        tag = f"at:{kind}{''.join(letters)}"
        found.setdefault(crc_hqx(tag.encode(), 0) % _SLOTS * SHARDS // _SLOTS, tag)
    return tuple(f"{{{found[shard]}}}:" for shard in range(SHARDS))


SHARD = _find_tags("s")  #: prefix of the keys of each shard
#: Followed by the user id: time of the user's last message, ms, as 6 bytes, then the session of the last frame.
PRESENCE = _find_tags("u")


def _shard_keys(suffix: str) -> tuple[str, ...]:
    return tuple(prefix + suffix for prefix in SHARD)


DUE = _shard_keys("due")
INFLIGHT = _shard_keys("inflight")
POLICIES = _shard_keys("policies")
ACTIVE = _shard_keys("active")
PAUSED = _shard_keys("paused")
COUNTS = _shard_keys("counts")
IDLE = _shard_keys("idle")  #: sorted set: the latest sessions without a timer (see `lua/prelude.lua`)
REVOKED = _shard_keys("revoked")  #: sorted set (see `lua/revoke.lua`)
DAYS = _shard_keys("day:")  #: followed by the day; hash: what is counted of each policy (see `lua/note_activity.lua`)
SESSION = _shard_keys("s:")  #: followed by the session id
INBOX = _shard_keys("in:")  #: likewise: stream of the last messages (see `lua/prelude.lua`)
ONCE = _shard_keys("once:")  #: likewise: sorted set of the names of messages
WATCHERS = "{at:watch}"  #: hash: the state of each watcher
SILENCES = "{at:watch}:silences"  #: hash: number of recorded silences by policy


def session_key(session_id: str) -> str:
    return SESSION[shard_of(session_id)] + session_id


def inbox_keys(session_id: str) -> list[str]:
    """Return the keys of a session's messages and of their names."""
    shard = shard_of(session_id)
    return [INBOX[shard] + session_id, ONCE[shard] + session_id]


def presence_key(user_id: str) -> str:
    return PRESENCE[shard_of(user_id)] + user_id


def day_keys(days_ago: int = 0) -> list[str]:
    """Return the key of each shard's counts of a day, by this node's clock."""
    day = int(time.time()) // 86_400 - days_ago
    return [f"{prefix}{day}" for prefix in DAYS]
