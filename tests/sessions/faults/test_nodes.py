"""Web nodes and watchers are killed, and clocks jump, during live chats."""

import signal

import pytest
import requests

from tests.sessions.faults.shifted_clock import set_clock
from tests.support.waiting import WAIT_LIMIT

RESTARTS = 1012


@pytest.fixture
def chat_stack(shared_chat_stack):
    """Guide messages appear in the chats."""
    shared_chat_stack.send_by("inapp")
    yield shared_chat_stack
    shared_chat_stack.send_by("log")


def test_clients_reconnect_when_web_node_and_watcher_stop(chat_stack, run_under_load):
    """Who was on that node comes back on the other one, and has missed nothing."""
    target = chat_stack
    stays, goes, watcher = target.web("web-a"), target.web("web-b"), target.watcher()
    with target.running(stays, goes, watcher):
        target.await_watcher(watcher)
        with run_under_load(target, "SIGTERM of a web node and of a watcher", stays, goes) as run:
            run.go_on()
            moved = [
                (person.client, len(person.client.codes)) for person in run.chat_users.users if is_on(goes, person)
            ]
            first, second = run.chance.sample([goes, watcher], 2)
            first.process.send_signal(signal.SIGTERM)
            run.go_on()
            second.process.send_signal(signal.SIGTERM)
            assert watcher.process.wait(WAIT_LIMIT) == 0
            goes.process.wait(WAIT_LIMIT)
            target.wait(lambda: all(is_on(stays, person) for person in run.chat_users.users), "all are back")
            run.go_on()
            run.notes.append(f"{len(moved)} of {len(run.chat_users.users)} connections came back on the other node")
        assert moved
        assert {person.client.node for person in run.chat_users.users} == {stays.address}
        assert {client.codes[before] for client, before in moved} == {RESTARTS}


def is_on(node, person):
    return person.client.node == node.address and person.client.connected.is_set()


@pytest.mark.campaign
def test_twenty_node_stops_lose_no_message(chat_stack, run_under_load):
    """Asked to end or killed, one of them at a time, and started again."""
    target = chat_stack
    programs = {"web-a": target.web("web-a"), "web-b": target.web("web-b"), "watcher": target.watcher()}
    try:
        target.await_watcher(programs["watcher"])
        with run_under_load(target, "web nodes and a watcher, 20 points", programs["web-a"], programs["web-b"]) as run:
            for _ in range(20):
                run.go_on()
                name = run.chance.choice(sorted(programs))
                programs[name].process.send_signal(run.chance.choice([signal.SIGTERM, signal.SIGKILL]))
                programs[name].process.wait(WAIT_LIMIT)
                run.go_on()
                port = programs[name].port if name != "watcher" else 0
                programs[name] = target.web(name, port=port) if port else target.watcher()
                target.wait(
                    lambda: all(person.client.connected.is_set() for person in run.chat_users.users), "all are back"
                )
    finally:
        with target.running(*programs.values()):
            pass


def test_clock_jump_of_node_sends_nothing_early_or_twice(chat_stack, run_under_load):
    """A web node, all watchers and all workers are half a minute ahead, and then behind: nothing comes early or twice.
    While the workers are behind, everything comes as much later."""
    target, clock = chat_stack, chat_stack.stack.state_dir / "clock"
    set_clock(clock, 0)
    right, odd = target.web("web-a"), target.web("web-b", clock)
    watcher, worker = target.watcher(clock), target.worker(clock)
    for program in ("watcher", "core"):
        target.stack.stop(program)
    try:
        with target.running(right, odd, watcher, worker):
            target.await_watcher(watcher)
            with run_under_load(target, "the clock of a node jumps", right, odd) as run:
                run.go_on()
                for seconds in (30, -15):
                    set_clock(clock, seconds)
                    target.wait(lambda seconds=seconds: abs(skew(odd) - abs(seconds)) < 5, "it says so")
                    run.go_on()
                target.wait(lambda: skew(right) < 5, "the other node says that its clock is right")
    finally:
        for program in ("watcher", "core"):
            target.stack.start(program)


def skew(node):
    """Return the node's reported distance from the database's clock, in seconds."""
    found = requests.get(f"http://{node.address}/health/ready", timeout=WAIT_LIMIT).json()
    return float(found["database"].get("clock_skew_seconds", 0))
