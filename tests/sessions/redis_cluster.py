"""A Redis Cluster of our own on loopback: three primaries with a replica each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from config.local.processes import select_port, wait_until
from tests.faults.brokers import RedisServer, redis_server
from tests.support.waiting import WAIT_LIMIT

PRIMARIES, SLOTS = 3, 16_384
NODE_TIMEOUT = 3_000  #: ms until a node without an answer counts as failed, while nodes join and after a kill
PATIENCE = 120_000  #: the same between: nodes of an overloaded machine stall, and a fail-over would fail the test


@dataclass
class ClusterUnderTest:
    nodes: list[RedisServer]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def ask(self, node: RedisServer, *words: Any) -> Any:
        with redis.Redis(port=node.port, socket_timeout=60, decode_responses=True) as client:
            return client.execute_command(*words)

    def set_node_timeout(self, milliseconds: int) -> None:
        for node in self.nodes:
            self.ask(node, "CONFIG SET", "cluster-node-timeout", milliseconds)

    def kill(self, node: RedisServer) -> None:
        self.set_node_timeout(NODE_TIMEOUT)
        node.kill()

    def restart(self, node: RedisServer) -> None:
        """Start a killed node. Return before it has its place."""
        node.start()
        self.set_node_timeout(PATIENCE)

    def row_of(self, node: RedisServer) -> dict[str, str]:
        """As the node describes itself: id, flags and slots."""
        for row in self.ask(node, "CLUSTER NODES").values():
            if "myself" in row["flags"]:
                return dict(row)
        raise AssertionError("a node does not know itself")

    def id_of(self, node: RedisServer) -> str:
        return str(self.ask(node, "CLUSTER", "MYID"))

    def owner_of(self, slot: int, *, besides: RedisServer | None = None) -> RedisServer:
        """Return the primary of a slot, as a living node names it."""
        teller = next(node for node in self.nodes if node is not besides and node.answers())
        for first, last, primary, *_ in self.ask(teller, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == primary[1])
        raise AssertionError(f"slot {slot} has no owner")

    def agrees(self) -> bool:
        """Every node sees all slots served, and every replica follows its primary."""
        return all(self._is_sound(node) for node in self.nodes)

    def _is_sound(self, node: RedisServer) -> bool:
        state = self.ask(node, "CLUSTER INFO")
        replication = self.ask(node, "INFO", "replication")
        linked = replication["role"] == "master" or replication["master_link_status"] == "up"
        # Without full coverage the state is "ok" even while a slot has no owner that this node knows.
        return (
            int(state["cluster_slots_ok"]) == SLOTS and int(state["cluster_known_nodes"]) == len(self.nodes) and linked
        )


@contextmanager
def redis_cluster(folder: Path) -> Iterator[ClusterUnderTest]:
    with ExitStack() as stack:
        made = ClusterUnderTest([stack.enter_context(_node(folder)) for _ in range(2 * PRIMARIES)])
        _join(made)
        yield made


@contextmanager
def _node(folder: Path) -> Iterator[RedisServer]:
    words = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT)]
    words += ["--cluster-require-full-coverage", "no", "--cluster-port", str(select_port())]
    words += ["--repl-diskless-sync-delay", "0"]
    with redis_server(folder, *words) as server:
        yield server


def _join(made: ClusterUnderTest) -> None:
    first, bounds = made.nodes[0], [SLOTS * number // PRIMARIES for number in range(PRIMARIES + 1)]
    for number in range(PRIMARIES):
        made.ask(made.nodes[number], "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
    for number, node in enumerate(made.nodes):
        made.ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for node in made.nodes[1:]:
        bus = made.ask(node, "CONFIG GET", "cluster-port")["cluster-port"]
        made.ask(first, "CLUSTER", "MEET", "127.0.0.1", node.port, bus)
    known = wait_until(lambda: all(_knows_all(made, node) for node in made.nodes), WAIT_LIMIT)
    assert known, "the nodes do not find each other"
    for number, node in enumerate(made.nodes[PRIMARIES:]):
        made.ask(node, "CLUSTER", "REPLICATE", made.id_of(made.nodes[number]))
    assert wait_until(made.agrees, WAIT_LIMIT), "the cluster is not complete"
    made.set_node_timeout(PATIENCE)


def _knows_all(made: ClusterUnderTest, node: RedisServer) -> bool:
    rows = made.ask(node, "CLUSTER NODES").values()
    return len(rows) == len(made.nodes) and all("handshake" not in row["flags"] for row in rows)
