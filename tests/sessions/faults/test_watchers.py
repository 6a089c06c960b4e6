"""Two watchers and a worker on real servers, struck at random points: each silence gives one message or one reason."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from uuid import uuid4

import psutil
import pytest

from config.local.processes import wait_until
from sessions.store.client import Server
from tests.sessions.faults.chat_load import ChatTraffic, count, list_timer_starts
from tests.sessions.faults.chat_stack import WAIT_LIMIT, ChatStack, Program, seed_of_this_run

pytestmark = pytest.mark.faults


class Watchers:
    """The one of the stack, which is started anew when it dies, and a second one of ours."""

    def __init__(self, target: ChatStack) -> None:
        self.target = target
        self.second: Program = target.watcher()

    def kill_one(self, chance: random.Random) -> None:
        if chance.random() < 0.5:
            self.second.kill()
            self.second = self.target.watcher()
        else:
            stack = self.target.stack
            stack.wait_until(lambda: "watcher" in stack.pids, WAIT_LIMIT, "the start after the last kill")
            stack.kill("watcher")


@pytest.fixture
def two_watchers(shared_chat_stack: ChatStack) -> Iterator[Watchers]:
    made = Watchers(shared_chat_stack)
    try:
        shared_chat_stack.await_watcher(made.second)
        yield made
    finally:
        with shared_chat_stack.running(made.second):
            pass


ChatLoad = Callable[..., AbstractContextManager[tuple[ChatTraffic, random.Random]]]


@pytest.fixture
def chat_load(two_watchers: Watchers, report_line: Callable[[str], None]) -> ChatLoad:
    target = two_watchers.target

    @contextmanager
    def chat_load(
        name: str, *, rate: float = 20.0, keeps_pinging: bool = False
    ) -> Iterator[tuple[ChatTraffic, random.Random]]:
        """Load for the length of the block, then the end of everything, then the count."""
        seed = seed_of_this_run()
        print(f"{name}: seed {seed} (FAULTS_SEED={seed} repeats it)")
        traffic = ChatTraffic(target.stack.endpoints.redis_url, f"{uuid4().hex[:8]}-", rate, random.Random(seed + 1))
        traffic.keeps_pinging = keeps_pinging
        with traffic:
            yield traffic, random.Random(seed)
            traffic.stop_talking()
        target.await_rest(traffic.prefix)
        found = count(target, traffic)
        report_line(found.line(name, seed))
        assert not found.problems, "\n".join([*found.problems[:20], target.logs()])
        assert found.sessions == len(traffic.chats) > 0

    return chat_load


def test_silences_survive_killed_watchers(two_watchers: Watchers, chat_load: ChatLoad) -> None:
    with chat_load("kill -9 watcher, 3 points") as (_, chance):
        for _ in range(3):
            time.sleep(chance.uniform(0.3, 1.5))
            two_watchers.kill_one(chance)


@pytest.mark.campaign
def test_silences_survive_twenty_killed_watchers(two_watchers: Watchers, chat_load: ChatLoad) -> None:
    with chat_load("kill -9 watcher, 20 points", rate=60) as (_, chance):
        for _ in range(20):
            time.sleep(chance.uniform(0.3, 3.0))
            two_watchers.kill_one(chance)


def test_silences_survive_postgresql_outage(shared_chat_stack: ChatStack, chat_load: ChatLoad) -> None:
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


def test_silences_survive_killed_valkey(shared_chat_stack: ChatStack, chat_load: ChatLoad) -> None:
    with chat_load("kill -9 Valkey") as (_, chance):
        time.sleep(chance.uniform(2.0, 4.0))
        killed = shared_chat_stack.stack.kill("Valkey")
        assert wait_until(lambda: shared_chat_stack.stack.server_pids.get("Valkey", killed) != killed, WAIT_LIMIT)
        time.sleep(3)


def test_sessions_are_armed_again_after_flush(shared_chat_stack: ChatStack, chat_load: ChatLoad) -> None:
    """Who is there is armed again by the next ping. What had fallen silent and was not handed in yet is lost."""
    with chat_load("FLUSHALL", keeps_pinging=True) as (traffic, chance):
        time.sleep(chance.uniform(2.0, 4.0))
        server = Server(shared_chat_stack.stack.endpoints.redis_url)
        server.client.flushall()
        server.client.script_flush()
        server.client.close()
        there = {chat.session for chat in traffic.chats}
        assert wait_until(lambda: there <= list_timer_starts(traffic).keys(), WAIT_LIMIT)
        assert len(there) > 20


def test_stopped_watcher_leaves_silences_to_the_other(two_watchers: Watchers, chat_load: ChatLoad) -> None:
    target = two_watchers.target
    with chat_load("SIGTERM watcher"):
        for _ in range(3):
            target.await_watcher(two_watchers.second)
            time.sleep(0.5)
            assert two_watchers.second.terminate() == 0
            time.sleep(0.5)
            two_watchers.second = target.watcher()
