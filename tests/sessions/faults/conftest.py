"""One stack for most of these tests, and the crowd in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
import requests

from config.local.processes import wait_until
from tests.sessions.faults.chat_results import Count
from tests.sessions.faults.chat_stack import ChatStack, Program, run_chat_stack, seed_of_this_run
from tests.sessions.faults.chat_users import ChatUsers


@pytest.fixture(scope="session")
def shared_chat_stack(state_folder: Callable[[str], Path]) -> Iterator[ChatStack]:
    with run_chat_stack(state_folder("chats")) as made:
        yield made


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
        """How many were handed in."""
        where = "SELECT count(*) FROM scheduling_event WHERE type = 'session.silent' AND event_id LIKE %s"
        return int(self.target.sql(where, [f"{self.chat_users.prefix}%"])[0][0])


RunUnderLoad = Callable[..., AbstractContextManager[Run]]


@pytest.fixture
def run_under_load(report_line: Callable[[str], None]) -> RunUnderLoad:
    @contextmanager
    def run_under_load(target: ChatStack, name: str, *nodes: Program, in_order: bool = True) -> Iterator[Run]:
        """Load for the length of the block, then the end of everything, then the count."""
        seed = seed_of_this_run()
        print(f"{name}: seed {seed} (FAULTS_SEED={seed} repeats it)")
        for node in nodes:
            target.wait(lambda node=node: _answers(node), f"{node.name} answers")  # type: ignore[misc]
        chance = random.Random(seed)
        chat_users = ChatUsers([node.address for node in nodes], f"{uuid4().hex[:8]}-", CHATS, random.Random(seed + 1))
        run = Run(target, chat_users, chance)
        with chat_users:
            yield run
            chat_users.stop_talking()
            target.await_rest(chat_users.prefix)
            count = Count(target, chat_users, in_order)
            # What is told last may still be on its way to somebody.
            wait_until(lambda: not count.problems(), 30, pause=0.5)
        problems = count.problems()
        report_line(count.line(name, seed, *run.notes))
        assert not problems, "\n".join([*problems[:20], target.logs()])

    return run_under_load


def _answers(node: Program) -> bool:
    try:
        return requests.get(f"http://{node.address}/health/live", timeout=5).status_code == 200
    except requests.RequestException:
        return False
