"""Work that is cheap together: what comes within a moment goes to a thread as one batch, one batch after another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from django.db import close_old_connections

T = TypeVar("T")
R = TypeVar("R")

Done = Callable[[R | Exception], None]

MOST = 500  #: items of a batch
WAITING_LIMIT = 20_000  #: more than a second's worth would only be answered too late


class Overloaded(Exception):
    """Too much waits already. Send it again in a moment."""


class Gathering(Generic[T, R]):
    """Of one event loop. `work` gets the items in their order, in a thread that has no second batch at the same time;
    what it raises, each of the batch gets. The first item of a batch waits `moment` seconds for others."""

    def __init__(self, work: Callable[[Sequence[T]], Sequence[R]], *, moment: float, name: str) -> None:
        self._work = work
        self._moment = moment
        self._waiting: deque[tuple[T, Done[R]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._full = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def submit(self, item: T, done: Done[R]) -> None:
        """`done` is called on this loop with the result, or with what went wrong. Raises `Overloaded` at once."""
        if len(self._waiting) >= WAITING_LIMIT:
            raise Overloaded
        self._waiting.append((item, done))
        if len(self._waiting) >= MOST:
            self._full.set()
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def ask(self, item: T) -> R:
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.submit(item, lambda result: _settle(future, result))
        return await future

    async def ask_all(self, items: Sequence[T]) -> list[R]:
        """In one batch, unless there are more than fit."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[R]] = [loop.create_future() for _ in items]
        for item, future in zip(items, futures, strict=True):
            self.submit(item, lambda result, future=future: _settle(future, result))  # type: ignore[misc]
        return list(await asyncio.gather(*futures))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                await self._gather()
                batch = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
                results = await loop.run_in_executor(self._thread, self._outcomes, [item for item, _ in batch])
                for (_, done), result in zip(batch, results, strict=True):
                    done(result)
        finally:
            self._running = None

    async def _gather(self) -> None:
        if len(self._waiting) >= MOST:
            return
        self._full.clear()
        try:
            async with asyncio.timeout(self._moment):
                await self._full.wait()
        except TimeoutError:
            return

    def _outcomes(self, items: list[T]) -> Sequence[R | Exception]:
        try:
            return self._work(items)
        except Exception as error:
            return [error] * len(items)
        finally:
            close_old_connections()


def _settle(future: asyncio.Future[R], result: R | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
