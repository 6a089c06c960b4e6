"""The store's client on a real cluster: where keys lie, which addresses are refused, and what a lost node costs."""

import threading
import time
from collections import Counter
from datetime import timedelta
from itertools import chain

import pytest
import redis
from django.core.checks.registry import registry
from redis import retry
from redis.crc import key_slot

from config.environment import ROOT
from config.local.processes import wait_until
from sessions.checks import check_cluster_mode, check_eviction
from sessions.detection import expired_keys
from sessions.detection.expired_keys import ExpiredKeyListener, KeyspaceEventsDisabled, Pattern
from sessions.frames import Frame
from sessions.policy import Policy, PolicySet
from sessions.store import client, stats
from sessions.store.client import Server, StoreUnavailable, presence_key
from sessions.store.inbox import Post
from sessions.store.sessions import Store
from sessions.websocket.connection import FrameRequest, write_frames
from tests.sessions.redis_cluster import SLOTS
from tests.support.waiting import WAIT_LIMIT

NOWHERE = "127.0.0.1:1"


def slot_of(key):
    return key_slot(key.encode())


@pytest.mark.parametrize("prefixes", [client.SHARD, client.PRESENCE])
def test_shards_lie_in_equal_parts_of_the_slots(prefixes):
    assert [slot_of(each) * client.SHARDS // SLOTS for each in prefixes] == list(range(client.SHARDS))
    assert sorted(Counter(slot_of(each) * 3 // SLOTS for each in prefixes).values()) == [5, 5, 6]


def test_check_refuses_address_of_the_other_mode(settings, cluster, valkey):
    def problems(url):
        settings.AFTERTOUCH_SESSIONS_REDIS_URL = url
        return [each.msg for each in check_cluster_mode() if each.id == "aftertouch.E006"]

    assert check_cluster_mode in registry.get_checks()
    single, port = settings.REDIS_URL, cluster.nodes[0].port
    assert problems(f"redis://127.0.0.1:{port}/0") == [
        "AFTERTOUCH_SESSIONS_REDIS_URL names a node of a Redis Cluster (cluster_enabled: 1) as a single server."
    ]
    assert problems(single.replace("redis://", "redis+cluster://").removesuffix("/0")) == [
        "AFTERTOUCH_SESSIONS_REDIS_URL names a cluster, but its server runs without cluster mode (cluster_enabled: 0)."
    ]
    live = f"redis+cluster://{NOWHERE},127.0.0.1:{port}"
    for fit in (single, live, f"redis+cluster://{NOWHERE}", f"redis://{NOWHERE}/0", ""):
        assert problems(fit) == []


def test_check_asks_a_dead_node_once(monkeypatch, settings):
    """Each program waited four seconds for it at its start."""
    pauses = []
    monkeypatch.setattr(retry, "sleep", pauses.append)
    settings.AFTERTOUCH_SESSIONS_REDIS_URL = f"redis+cluster://{NOWHERE}"
    assert (check_cluster_mode(), check_eviction()) == ([], [])
    assert pauses == []


def test_cluster_is_found_by_any_node_of_the_address(cluster):
    node = cluster.nodes[-1]
    assert wait_until(cluster.agrees, WAIT_LIMIT)
    server = Server(f"redis+cluster://{NOWHERE},127.0.0.1:{node.port}")
    answers = server.ask(lambda pipe: [pipe.time(), *(pipe.exists(key) for key in client.DUE)])
    assert len(answers) == 1 + client.SHARDS
    server.client.close()


def test_commands_of_a_batch_keep_the_order_of_their_answers(cluster):
    server = Server(cluster.url)
    keys = [f"{prefix}order" for prefix in client.SHARD]
    answers = server.ask(
        lambda pipe: list(
            chain.from_iterable((pipe.set(key, number), pipe.get(key)) for number, key in enumerate(keys))
        )
    )
    assert answers[1::2] == [str(number).encode() for number in range(len(keys))]
    server.client.close()


@pytest.fixture
def events_of_all_nodes(cluster):
    for node in cluster.nodes:
        cluster.ask(node, "CONFIG SET", "notify-keyspace-events", "Ex")
    yield
    for node in cluster.nodes:
        cluster.ask(node, "CONFIG SET", "notify-keyspace-events", "")


@pytest.fixture
def login(cluster):
    """Give a user of `deploy/redis/users.acl` its rights on every node. Returns the address with its login."""
    lines = (ROOT / "deploy/redis/users.acl").read_text().splitlines()
    rights = {line.split()[1]: line.split()[2:] for line in lines if line.startswith("user ")}

    def log_in(name, *more):
        for node in cluster.nodes:
            words = [word.replace("PASSWORD", "s3cret") for word in rights[name]]
            cluster.ask(node, "ACL", "SETUSER", name, "reset", *words, *more)
        return cluster.url.replace("//", f"//{name}:s3cret@")

    yield log_in
    for node in cluster.nodes:
        cluster.ask(node, "ACL", "DELUSER", *(name for name in rights if name not in ("default", "admin")))


@pytest.mark.usefixtures("events_of_all_nodes")
def test_listener_receives_expiries_of_every_primary(cluster, chats, login, monkeypatch):
    monkeypatch.setattr(expired_keys, "PROBE_WITHIN", WAIT_LIMIT)
    gateway, stop = Server(login("listener")), threading.Event()
    listener = ExpiredKeyListener(
        gateway, chats.store, Pattern("session:*"), tag="", window=timedelta(seconds=30), stop=stop
    )
    listener.check()
    listener.start()
    assert listener.connected.wait(WAIT_LIMIT)
    owner = Server(cluster.url)
    users = [f"u{number}" for number in range(30)]
    assert len({slot_of(f"session:{user}") * 3 // SLOTS for user in users}) == 3
    owner.ask(lambda pipe: [pipe.set(f"session:{user}", "1", px=1) for user in users])
    found = set()

    def all_are_found():
        owner.ask(lambda pipe: [pipe.exists(f"session:{user}") for user in users])  # a look makes a server notice
        found.update(claim.user_id for claim in chats.claim())
        return found == set(users)

    assert wait_until(all_are_found, WAIT_LIMIT), sorted(set(users) - found)
    stop.set()
    listener.join()
    gateway.client.close()
    owner.client.close()


@pytest.mark.usefixtures("events_of_all_nodes")
def test_listener_refuses_cluster_with_one_silent_primary(cluster, chats):
    gateway, silent = Server(cluster.url), cluster.owner_of(0)
    listener = ExpiredKeyListener(
        gateway, chats.store, Pattern("session:*"), tag="", window=timedelta(seconds=30), stop=threading.Event()
    )
    listener.check()
    cluster.ask(silent, "CONFIG SET", "notify-keyspace-events", "")
    with pytest.raises(KeyspaceEventsDisabled, match="must have E and x"):
        listener.check()
    gateway.client.close()


@pytest.mark.usefixtures("empty_cluster")
@pytest.mark.parametrize("name", ["web", "core", "watcher", "listener", "beat"])
def test_users_of_the_acl_file_can_use_a_cluster(cluster, login, name):
    policies = PolicySet({"default": Policy(timedelta(seconds=60))})
    store = Store(Server(login(name)), lambda: policies)
    store.note_activity([Frame(f"acl-{name}-{number}", "ann") for number in range(50)])
    assert store.claim_silent(10, timedelta(seconds=30)).silences == []
    assert stats.read_overview(store).armed >= 50
    with pytest.raises(redis.exceptions.NoPermissionError):
        store.server.client.flushall()
    store.server.client.close()


def test_frames_of_a_lost_primary_fail_alone(cluster, monkeypatch):
    """The node is skipped, as one that did not answer."""
    policies = PolicySet({"default": Policy(timedelta(seconds=60))})
    store = Store(Server(cluster.url), lambda: policies)
    sessions = [f"lost-{number}" for number in range(40)]
    slips = [
        FrameRequest(Frame(each, f"user-{each}"), Post(each, f"m{number}", "user", "hi"), needs_cursor=True)
        for number, each in enumerate(sessions)
    ]
    store.push(policies)
    nodes = {slot * SLOTS // 3: cluster.owner_of(slot * SLOTS // 3).port for slot in range(3)}

    def owner_of(key):
        return nodes[slot_of(key) * 3 // SLOTS * SLOTS // 3]

    owners = [owner_of(client.SHARD[client.shard_of(each)]) for each in sessions]
    users = [owner_of(presence_key(f"user-{each}")) for each in sessions]
    lost = owners[0]
    monkeypatch.setitem(store.server.client._skipped, f"127.0.0.1:{lost}", time.monotonic() + 3600)
    results = write_frames(store, slips)
    # A message counts only where it also stops touches of its user.
    fails = [lost in pair for pair in zip(owners, users, strict=True)]
    assert [isinstance(each, StoreUnavailable) for each in results] == fails
    assert 0 < sum(fails) < len(fails)
    assert len(set(owners)) == 3
    with pytest.raises(StoreUnavailable):
        write_frames(store, [slip for slip, owner in zip(slips, owners, strict=True) if owner == lost])
    claimed = store.claim_silent(10, timedelta(seconds=30))
    assert claimed.versions == {policies.version}
    monkeypatch.undo()
    assert not any(isinstance(each, Exception) for each in write_frames(store, slips))
    store.server.client.close()
