"""Two watchers and a worker on real servers, killed at random points: each silence gives one message or one reason."""

import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain

import psutil
import psycopg
import pytest

from config.local.processes import wait_until
from sessions.detection.watcher import LEASE
from sessions.store import client, stats
from sessions.store.client import Server
from tests.sessions.faults.chat_load import list_timer_starts
from tests.support.waiting import WAIT_LIMIT


class Watchers:
    """The stack's watcher, restarted when it dies, and a second one of the test."""

    def __init__(self, target):
        self.target = target
        self.second = target.watcher()

    def kill_one(self, chance):
        if chance.random() < 0.5:
            self.second.kill()
            self.second = self.target.watcher()
        else:
            stack = self.target.stack
            stack.wait_until(lambda: "watcher" in stack.pids, WAIT_LIMIT, "the start after the last kill")
            stack.kill("watcher")


@pytest.fixture
def two_watchers(shared_chat_stack):
    made = Watchers(shared_chat_stack)
    try:
        shared_chat_stack.await_watcher(made.second)
        yield made
    finally:
        with shared_chat_stack.running(made.second):
            pass


@pytest.fixture
def chat_load(two_watchers, load_chats):
    return partial(load_chats, two_watchers.target)


def test_silences_survive_killed_watchers(two_watchers, chat_load):
    with chat_load("kill -9 watcher, 3 points") as (_, chance):
        for _ in range(3):
            time.sleep(chance.uniform(0.3, 1.5))
            two_watchers.kill_one(chance)


@pytest.mark.campaign
def test_silences_survive_twenty_killed_watchers(two_watchers, chat_load):
    with chat_load("kill -9 watcher, 20 points", rate=60) as (_, chance):
        for _ in range(20):
            time.sleep(chance.uniform(0.3, 3.0))
            two_watchers.kill_one(chance)


def test_silences_survive_postgresql_outage(shared_chat_stack, chat_load):
    with chat_load("PostgreSQL killed, then out of reach for 10 s") as (_, chance):
        time.sleep(chance.uniform(1.0, 3.0))
        killed = shared_chat_stack.stack.kill("PostgreSQL")
        assert wait_until(lambda: shared_chat_stack.stack.server_pids.get("PostgreSQL", killed) != killed, WAIT_LIMIT)
        time.sleep(chance.uniform(1.0, 2.0))
        main = psutil.Process(shared_chat_stack.stack.server_pids["PostgreSQL"])
        stopped = [main, *main.children(recursive=True)]
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            time.sleep(10)
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        time.sleep(2)


def test_silences_survive_killed_store(shared_chat_stack, chat_load):
    with chat_load("kill -9 of the Valkey of live chats") as (_, chance):
        time.sleep(chance.uniform(2.0, 4.0))
        shared_chat_stack.kill_store()
        time.sleep(3)


def test_sessions_are_armed_again_after_flush(shared_chat_stack, chat_load):
    """Present users are armed again by the next ping. Silences that were not recorded yet are lost."""
    with chat_load("FLUSHALL", keeps_pinging=True) as (traffic, chance):
        time.sleep(chance.uniform(2.0, 4.0))
        shared_chat_stack.wait(lambda: len(traffic.chats) > 20, "some users write")
        server = Server(shared_chat_stack.chats_url)
        server.client.flushall()
        server.client.script_flush()
        server.client.close()
        there = {chat.session for chat in traffic.chats}
        assert wait_until(lambda: there <= list_timer_starts(traffic).keys(), WAIT_LIMIT)


def test_frozen_watcher_is_taken_over(two_watchers, chat_load, report_line):
    """It freezes inside its transaction. The other one waits for its lease, and records what it had claimed."""
    target = two_watchers.target
    with chat_load("SIGSTOP watcher"):
        first = psutil.Process(target.stack.pids["watcher"])
        second = psutil.Process(two_watchers.second.process.pid)
        first.suspend()
        second.suspend()
        try:
            try:
                target.wait(lambda: count_overdue(target) >= 10, "deadlines pass without a watcher", pause=0.05)
                with psycopg.connect(target.stack.endpoints.database_url) as holder:
                    holder.execute("LOCK TABLE scheduling_event IN SHARE MODE")
                    second.resume()
                    target.wait(lambda: bool(claimed_silences(target)), "the watcher records silences", pause=0.01)
                    second.suspend()
                    claimed = claimed_silences(target)
            finally:
                first.resume()
            assert claimed
            held_up = wait_and_measure(target, lambda: recorded(target, [*claimed]) == len(claimed))
        finally:
            second.resume()
    taken = target.sql("SELECT event_id, received_at FROM scheduling_event WHERE event_id = ANY(%s)", [[*claimed]])
    latest = max(received_at - claimed[event_id] for event_id, received_at in taken)  # some users wrote again
    report_line(f"the latest of {len(taken)} silences of a frozen watcher was recorded {latest} after its claim")
    assert LEASE <= latest <= TAKEN_WITHIN + held_up


TAKEN_WITHIN = timedelta(seconds=30)  #: from the claim, by Redis, to the event, by PostgreSQL
LOOK = 0.2  #: seconds that a look of `wait_and_measure` takes at most, with its pause


def wait_and_measure(target, happened):
    """Wait for the other watcher. Return for how long the machine delayed the looks, and so the watcher."""
    late, looked_at = 0.0, time.monotonic()

    def look():
        nonlocal late, looked_at
        found, now = happened(), time.monotonic()
        late, looked_at = late + max(0.0, now - looked_at - LOOK), now
        return found

    target.wait(look, "the other one records them")
    return timedelta(seconds=late)


def count_overdue(target):
    """Return how many deadlines have passed without a claim."""
    server, now_ms = target.store().server, int(time.time() * 1000)
    found = server.ask(lambda pipe: [pipe.zcount(key, "-inf", now_ms) for key in client.DUE])
    server.client.close()
    return sum(found)


def claimed_silences(target):
    """Return the event ids of the silences in flight, with the instants of their claims."""
    store = target.store()
    found = store.server.ask(lambda pipe: [pipe.zrange(key, 0, -1, withscores=True) for key in client.INFLIGHT])
    leased_until = {each.decode(): datetime.fromtimestamp(ends_ms / 1000, UTC) for each, ends_ms in chain(*found)}
    armed = stats.session_snapshots(store, [*leased_until]) if leased_until else []
    store.server.client.close()
    return {f"{each.session_id}:{each.armed_at}": leased_until[each.session_id] - LEASE for each in armed}


def recorded(target, event_ids):
    """Return how many of these silences are recorded, or a later one of their chat: a user may have written again."""
    return int(target.sql(_RECORDED, [event_ids])[0][0])


_RECORDED = """
SELECT count(*) FROM unnest(%s::text[]) AS claimed(id)
WHERE EXISTS (
    SELECT FROM scheduling_event AS e
    WHERE split_part(e.event_id, ':', 1) = split_part(claimed.id, ':', 1)
      AND CASE e.type WHEN 'session.silent' THEN split_part(e.event_id, ':', 2)::bigint END
        >= split_part(claimed.id, ':', 2)::bigint
)
"""


def test_stopped_watcher_leaves_silences_to_the_other(two_watchers, chat_load):
    target = two_watchers.target
    with chat_load("SIGTERM watcher"):
        for _ in range(3):
            target.await_watcher(two_watchers.second)
            time.sleep(0.5)
            assert two_watchers.second.terminate() == 0
            time.sleep(0.5)
            two_watchers.second = target.watcher()
