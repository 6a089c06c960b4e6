"""People in chats over WebSockets: a user and an agent each, on different web nodes, as behind a load balancer."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle, islice
from typing import Any

import aiohttp

from examples.chat_client import ConnectionEnded, SessionClient
from sessions import tokens
from tests.support.waiting import WAIT_LIMIT

HOUR = 3600.0


class RoamingClient(SessionClient):
    """Each time it has to connect it tries the next node."""

    def __init__(self, nodes: Iterator[str], session: str, role: str) -> None:
        async def token() -> str:
            admission = tokens.Admission(session, f"user-{session}", "c1", "", role)
            return tokens.issue_token(admission, timedelta(seconds=600))[0]

        # Agents never ping, so their messages after a fault came through the channel layer.
        super().__init__("http://nowhere", session, token, ping_every=5.0 if role == "user" else HOUR)
        self._nodes = nodes
        self.session = session
        self.node = ""
        self.codes: list[int] = []  #: of the connections that ended

    async def _connect(self, http: aiohttp.ClientSession) -> tuple[int, str]:
        self.node = next(self._nodes)
        self.address = f"http://{self.node}/ws/v1/sessions/{self.session}"
        code, reason = await super()._connect(http)
        self.codes.append(code)
        return code, reason


@dataclass
class ChatUser:
    role: str
    client: RoamingClient
    said: list[str] = field(default_factory=list)
    acknowledged: dict[str, float] = field(default_factory=dict)  #: by id, when, by the monotonic clock
    heard: list[dict[str, Any]] = field(default_factory=list)  #: messages
    problem: str = ""

    async def send_message(self) -> None:
        number = len(self.said) + 1
        self.said.append(await self.client.message(f"{self.role} {number}", seq=number))

    async def listen(self) -> None:
        try:
            async for frame in self.client:
                if frame["type"] == "message":
                    self.heard.append(frame)
                elif frame["type"] == "ack":
                    self.acknowledged.setdefault(frame["id"], time.monotonic())
        except ConnectionEnded as ended:
            self.problem = f"{self.role} of {self.client.session} was turned away: {ended}"

    @property
    def is_answered(self) -> bool:
        return len(self.acknowledged) == len(self.said)


@dataclass
class ChatUsers:
    """Run this many chats in a thread until the block ends. `hush` makes each user write a last message."""

    nodes: Sequence[str]
    prefix: str
    size: int
    chance: random.Random
    chats: list[tuple[ChatUser, ChatUser]] = field(default_factory=list)
    failure: BaseException | None = None

    @property
    def users(self) -> list[ChatUser]:
        return [person for chat in self.chats for person in chat]

    def __enter__(self) -> ChatUsers:
        self._ready, self._hushed, self._hush, self._over = (threading.Event() for _ in range(4))
        self._thread = threading.Thread(target=self._run, name="crowd")
        self._thread.start()
        if not self._ready.wait(WAIT_LIMIT):
            self.__exit__()
            raise AssertionError("not everybody is connected")
        self._raise_failure()
        return self

    def __exit__(self, *_: Any) -> None:
        self._hush.set()
        self._over.set()
        self._thread.join()

    def stop_talking(self) -> None:
        """Wait until the last message of every user is acknowledged."""
        self._hush.set()
        if not self._hushed.wait(WAIT_LIMIT):
            waiting = [person for person in self.users if not person.is_answered]
            raise AssertionError(f"{len(waiting)} people wait for acknowledgements: {waiting[:3]}")
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure:
            raise AssertionError("the crowd broke down") from self.failure

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as failure:
            self.failure = failure
            raise
        finally:
            self._ready.set()
            self._hushed.set()

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            for number in range(self.size):
                # The nodes in turn, and user and agent never on the same one.
                self.chats.append((self._create_user(number, "user", 0), self._create_user(number, "agent", 1)))
            for person in self.users:
                await stack.enter_async_context(person.client)
            listening = [asyncio.create_task(person.listen()) for person in self.users]
            await asyncio.gather(*(person.client.connected.wait() for person in self.users))
            self._ready.set()
            await asyncio.gather(*(self._chat(*chat) for chat in self.chats))
            while not all(person.is_answered for person in self.users) and not self._over.is_set():
                await asyncio.sleep(0.05)
            self._hushed.set()
            while not self._over.is_set():
                await asyncio.sleep(0.05)
            for task in listening:
                task.cancel()

    def _create_user(self, number: int, role: str, turn: int) -> ChatUser:
        nodes = islice(cycle(self.nodes), (number + turn) % len(self.nodes), None)
        return ChatUser(role, RoamingClient(nodes, f"{self.prefix}{number}", role))

    async def _chat(self, user: ChatUser, agent: ChatUser) -> None:
        """Now and then the user thinks for longer than the threshold."""
        chance = random.Random(self.chance.random())
        while not self._hush.is_set():
            await user.send_message()
            if chance.random() < 0.3:
                await agent.send_message()
            ends_at = time.monotonic() + (
                chance.uniform(2.2, 3.5) if chance.random() < 0.2 else chance.uniform(0.2, 0.8)
            )
            while time.monotonic() < ends_at and not self._hush.is_set():
                await asyncio.sleep(0.05)
        await user.send_message()
