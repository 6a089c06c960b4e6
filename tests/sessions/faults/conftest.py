"""One stack for most of these tests, and the crowd in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

import pytest
import requests

from config.local.processes import wait_until
from tests.faults.brokers import Sentinels, sentinels
from tests.sessions.faults.chat_load import ChatTraffic, count
from tests.sessions.faults.chat_results import Count
from tests.sessions.faults.chat_stack import ChatStack, Program, run_chat_stack
from tests.sessions.faults.chat_users import ChatUsers
from tests.sessions.redis_cluster import ClusterUnderTest, redis_cluster
from tests.support.stack import read_seed
from tests.support.waiting import WAIT_LIMIT


@pytest.fixture(
    scope="session",
    params=["single", *(pytest.param(kind, marks=pytest.mark.campaign) for kind in ("Sentinel", "Cluster"))],
)
def shared_chat_stack(request, state_folder) -> Iterator[ChatStack]:
    """A stack with each kind of store for live chats."""
    folder = state_folder("chats")
    with ExitStack() as running:
        stores: Sentinels | ClusterUnderTest | None = None
        if request.param == "Sentinel":
            stores = running.enter_context(sentinels(folder / "redis"))
        elif request.param == "Cluster":
            stores = running.enter_context(redis_cluster(folder / "cluster"))
        yield running.enter_context(run_chat_stack(folder, stores))


CHATS = 20


@dataclass
class Run:
    """Chat users on a stack during a fault."""

    target: ChatStack
    chat_users: ChatUsers
    chance: random.Random
    notes: list[str] = field(default_factory=list)

    def go_on(self) -> None:
        """To a random point: until so many more messages were acknowledged."""
        more = self.chance.randint(20, 60)
        aim = self._acknowledged() + more
        self.target.wait(lambda: self._acknowledged() >= aim, f"{more} more messages are acknowledged")

    def _acknowledged(self) -> int:
        return sum(len(person.acknowledged) for person in self.chat_users.users)

    def silences(self) -> int:
        """Return the number of recorded silences."""
        where = "SELECT count(*) FROM scheduling_event WHERE type = 'session.silent' AND event_id LIKE %s"
        return int(self.target.sql(where, [f"{self.chat_users.prefix}%"])[0][0])


RunUnderLoad = Callable[..., AbstractContextManager[Run]]


@pytest.fixture
def run_under_load(report_line) -> RunUnderLoad:
    @contextmanager
    def run_under_load(target: ChatStack, name: str, *nodes: Program, in_order: bool = True) -> Iterator[Run]:
        """Load for the length of the block, then the end of everything, then the count."""
        seed = read_seed()
        print(f"{name}: seed {seed} (FAULTS_SEED={seed} repeats it)")
        for node in nodes:
            target.wait(lambda node=node: _answers(node), f"{node.name} answers")
        chance = random.Random(seed)
        chat_users = ChatUsers([node.address for node in nodes], f"{uuid4().hex[:8]}-", CHATS, random.Random(seed + 1))
        run = Run(target, chat_users, chance)
        with chat_users:
            yield run
            chat_users.stop_talking()
            target.await_rest(chat_users.prefix)
            count = Count(target, chat_users, in_order)
            # The last messages may still be in transit.
            wait_until(lambda: not count.problems(), WAIT_LIMIT, pause=0.5)
        problems = count.problems()
        report_line(count.line(name, seed, *run.notes))
        assert not problems, "\n".join([*problems[:20], target.logs()])

    return run_under_load


LoadChats = Callable[..., AbstractContextManager[tuple[ChatTraffic, random.Random]]]


@pytest.fixture
def load_chats(report_line) -> LoadChats:
    @contextmanager
    def load_chats(
        target: ChatStack, name: str, *, rate: float = 20.0, keeps_pinging: bool = False
    ) -> Iterator[tuple[ChatTraffic, random.Random]]:
        """Load for the length of the block, then the end of everything, then the count."""
        seed = read_seed()
        print(f"{name}: seed {seed} (FAULTS_SEED={seed} repeats it)")
        traffic = ChatTraffic(target.chats_url, f"{uuid4().hex[:8]}-", rate, random.Random(seed + 1))
        traffic.keeps_pinging = keeps_pinging
        with traffic:
            yield traffic, random.Random(seed)
            traffic.stop_talking()
        target.await_rest(traffic.prefix)
        found = count(target, traffic)
        report_line(found.line(name, seed))
        assert not found.problems, "\n".join([*found.problems[:20], target.logs()])
        assert found.sessions == len(traffic.chats) > 0

    return load_chats


def _answers(node: Program) -> bool:
    try:
        return requests.get(f"http://{node.address}/health/live", timeout=5).status_code == 200
    except requests.RequestException:
        return False
