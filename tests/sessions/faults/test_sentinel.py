"""The primary behind three Sentinels is killed: store, inboxes, channel layer and broker go over to its replica."""

import time
from contextlib import ExitStack, contextmanager

import pytest

from tests.faults.brokers import sentinels
from tests.sessions.faults.chat_stack import is_replica, run_chat_stack


@contextmanager
def chat_stack(folder):
    """Servers behind Sentinels, two web nodes and two watchers."""
    with ExitStack() as stack:
        watched = stack.enter_context(sentinels(folder / "redis"))
        made = stack.enter_context(run_chat_stack(folder, watched))
        made.send_by("inapp")
        one, other, watcher = made.web("web-a"), made.web("web-b"), made.watcher()
        stack.enter_context(made.running(one, other, watcher))
        made.await_watcher(watcher)
        yield watched, made, one, other


def kill_primary(watched, run):
    """Wait until everything goes on, and note how long it took. Returns who was killed."""
    silences, struck_at = run.silences(), time.monotonic()
    killed = watched.kill_primary()
    run.target.wait(lambda: watched.primary_port() not in (0, killed.port), "another primary is named")
    named = time.monotonic() - struck_at
    run.go_on()
    answered = [at for each in run.chat_users.users for at in each.acknowledged.values() if at > struck_at + 1]
    run.target.wait(lambda: run.silences() > silences, "silences are found again")
    run.notes.append(
        f"new primary after {named:.1f} s, first message taken after {min(answered) - struck_at:.1f} s,"
        f" first silence handed in within {time.monotonic() - struck_at:.1f} s"
    )
    return killed


def test_sentinel_failover_keeps_chats_and_silences(state_folder, run_under_load):
    with (
        chat_stack(state_folder("chats")) as (watched, made, one, other),
        run_under_load(made, "Sentinel fail-over of the store", one, other, in_order=False) as run,
    ):
        run.go_on()
        kill_primary(watched, run)
        run.go_on()


@pytest.mark.campaign
def test_repeated_sentinel_failovers_keep_chats_and_silences(state_folder, run_under_load):
    with (
        chat_stack(state_folder("chats")) as (watched, made, one, other),
        run_under_load(made, "Sentinel fail-over, 4 times", one, other, in_order=False) as run,
    ):
        for _ in range(4):
            run.go_on()
            killed = kill_primary(watched, run)
            killed.start()
            made.wait(lambda killed=killed: is_replica(killed), "it is back as a replica")
