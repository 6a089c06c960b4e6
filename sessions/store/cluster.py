"""Send commands about live sessions to the nodes of a Redis Cluster.

`redis.cluster` finds the nodes and keeps their connections. Its pipeline is not used: while one primary is
unreachable it fails the commands of all nodes, and it repeats commands one at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisClusterException, TryAgainError
from redis.retry import Retry

from scheduling.server_addresses import parse_redis

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
        return {node.name: self.cluster.get_redis_connection(node) for node in self._list_primaries()}

    def _list_primaries(self) -> list[ClusterNode]:
        found: list[ClusterNode] = self.cluster.nodes_manager.get_nodes_by_server_type("primary")
        return found

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
    slots = [_find_slot(words) for words, _ in commands]
    first = next((slot for slot in slots if slot is not None), 0)
    return [first if slot is None else slot for slot in slots]


def _find_slot(words: Sequence[Any]) -> int | None:
    place = 3 if words[0] in ("EVALSHA", "EVAL") else 1
    if len(words) <= place:
        return None
    key = words[place]
    return key_slot(key if isinstance(key, bytes) else str(key).encode())
