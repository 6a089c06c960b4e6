"""Live chats on a Redis Cluster of six nodes: a primary is killed, and slots move, while users write."""

import time
from datetime import timedelta

import pytest
from redis.crc import key_slot

from sessions.store import client
from sessions.store.client import StoreUnavailable
from tests.sessions.faults.chat_stack import run_chat_stack
from tests.sessions.redis_cluster import redis_cluster

SHARD = 3  #: the one whose slot moves, or whose primary dies
LEASE = timedelta(seconds=30)


def slot_of(key):
    return key_slot(key.encode())


SLOT = slot_of(client.SHARD[SHARD])


@pytest.fixture(scope="module")
def chat_cluster(state_folder):
    folder = state_folder("chats")
    with (
        redis_cluster(folder / "cluster") as made,
        run_chat_stack(folder, made) as target,
    ):
        yield made, target


def write_on(target, chats, more):
    """Wait until so many more users write."""
    aim = len(chats) + more
    target.wait(lambda: len(chats) >= aim, f"{more} more users write")


def test_silences_survive_moving_slots(chat_cluster, load_chats, report_line):
    """Atomically, as Valkey 9 does it, and then key by key, as older servers and Redis do it."""
    made, target = chat_cluster
    with load_chats(target, "a slot moves atomically, and back key by key", rate=40) as (traffic, _):
        write_on(target, traffic.chats, 60)
        old = made.owner_of(SLOT)
        new = next(node for node in made.nodes if "master" in made.row_of(node)["flags"] and node is not old)
        made.ask(old, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", SLOT, SLOT, "NODE", made.id_of(new))
        target.wait(lambda: made.owner_of(SLOT) is new, "the slot has moved")
        write_on(target, traffic.chats, 60)
        began_at = time.monotonic()
        moved = move_by_key(made, SLOT, new, old)
        took = time.monotonic() - began_at
        target.wait(lambda: made.owner_of(SLOT) is old, "the slot is back")
        write_on(target, traffic.chats, 60)
    report_line(f"a slot with {moved} keys moved back in {took:.2f} s · {traffic.refused} batches of frames refused")


def move_by_key(made, slot, source, target):
    """Returns the number of keys."""
    made.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", made.id_of(source))
    made.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", made.id_of(target))
    moved = 0
    while keys := made.ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 20):
        made.ask(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        moved += len(keys)
    for node in (target, source):
        made.ask(node, "CLUSTER", "SETSLOT", slot, "NODE", made.id_of(target))
    return moved


def test_silences_survive_killed_primary(chat_cluster, load_chats, report_line):
    """The other primaries answer all the time."""
    made, target = chat_cluster
    killed = made.owner_of(SLOT)
    others = [number for number, prefix in enumerate(client.SHARD) if made.owner_of(slot_of(prefix)) is not killed]
    store = target.store()
    with load_chats(target, "kill -9 of a primary", rate=40) as (traffic, _):
        write_on(target, traffic.chats, 60)
        struck_at = time.monotonic()
        made.kill(killed)
        found = store.claim_silent(0, LEASE)
        assert found.now_ms > 0
        assert store.claim_silent(0, LEASE, others).versions == found.versions
        target.wait(lambda: made.owner_of(SLOT, besides=killed) is not killed, "a replica takes over")
        named = time.monotonic() - struck_at
        target.wait(lambda: takes_frames(store), "its frames are taken again")
        took = time.monotonic() - struck_at
        write_on(target, traffic.chats, 60)
    store.server.client.close()
    report_line(f"a replica took over after {named:.1f} s, its first frame was taken after {took:.1f} s")
    made.restart(killed)
    target.wait(made.agrees, "the killed node is back as a replica")


def takes_frames(store):
    session = next(name for name in map(str, range(1000)) if client.shard_of(name) == SHARD)
    try:
        store.close(session, "-")
    except StoreUnavailable:
        return False
    return True
