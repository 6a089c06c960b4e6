"""Run work in batches: collect items of an event loop or of other threads for a thread, and halve a failed batch."""

from __future__ import annotations

import asyncio
import queue as queues
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import structlog
from django.db import close_old_connections

log = structlog.get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")

Done = Callable[[R | Exception], None]

MAX_BATCH = 500  #: items per batch
GATHER_LIMIT = 1000  #: items that a background thread gathers before it starts
WAITING_LIMIT = 20_000  #: items; the results of more than a second's work would come too late


def bisect(
    items: Sequence[T],
    act: Callable[[Sequence[T]], object],
    settle_failed: Callable[[T, Exception], None],
    *,
    concerns_all: Callable[[Exception, int], bool],
) -> None:
    """Run `act` on `items`. If it fails, halve them until the faulty item fails alone; `settle_failed` gets that item.

    Raises:
        Exception: an error of `act` for which `concerns_all` is true. It gets the error and the number of items.
    """
    try:
        act(items)
    except Exception as error:
        if not items or concerns_all(error, len(items)):
            raise
        if len(items) == 1:
            settle_failed(items[0], error)
            return
        for half in halve(items):
            bisect(half, act, settle_failed, concerns_all=concerns_all)


def halve(items: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the two halves of a failed batch."""
    half = len(items) // 2
    return items[:half], items[half:]


class BatcherOverloaded(Exception):
    """Too many items wait. The caller may send the item again later."""


class MicroBatcher(Generic[T, R]):
    """Run `work` on batches of items in one thread. Belongs to one event loop.

    `work` gets the items in their order and never runs twice at the same time. The first item of a batch waits `moment`
    seconds for others. An exception of `work` is the result of every item in the batch. `work` may return an exception
    as the result of an item.
    """

    def __init__(self, work: Callable[[Sequence[T]], Sequence[R | Exception]], *, moment: float, name: str) -> None:
        self._work = work
        self._moment = moment
        self._waiting: deque[tuple[T, Done[R]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._full = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def submit(self, item: T, done: Done[R]) -> None:
        """Queue an item. `done` is called on this loop with the result or the exception.

        Raises:
            BatcherOverloaded: at once, if `WAITING_LIMIT` items wait.
        """
        if len(self._waiting) >= WAITING_LIMIT:
            raise BatcherOverloaded
        self._waiting.append((item, done))
        if len(self._waiting) >= MAX_BATCH:
            self._full.set()
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def submit_and_wait(self, item: T) -> R:
        """Queue an item and return its result. Raises `BatcherOverloaded` or the exception of `work`."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.submit(item, lambda result: set_result(future, result))
        return await future

    async def submit_all_and_wait(self, items: Sequence[T]) -> list[R]:
        """Queue items together and return their results. They share a batch if they fit into it."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[R]] = [loop.create_future() for _ in items]
        for item, future in zip(items, futures, strict=True):
            self.submit(item, lambda result, future=future: set_result(future, result))  # type: ignore[misc]
        return list(await asyncio.gather(*futures))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                await self._gather()
                batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
                results = await loop.run_in_executor(self._thread, self._outcomes, [item for item, _ in batch])
                for (_, done), result in zip(batch, results, strict=True):
                    done(result)
        finally:
            self._running = None

    async def _gather(self) -> None:
        if len(self._waiting) >= MAX_BATCH:
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


def set_result(future: asyncio.Future[R], result: R | Exception) -> None:
    """Set a result or an exception, unless the waiting caller has cancelled the future."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class BackgroundBatcher(Generic[T]):
    """Run `work` on items in a background thread, so that no request or commit waits for it.

    What exceeds the capacity, fails or waits at the end of the process is lost. `name` is the first word of the log
    events. A new process that was forked starts a thread of its own.
    """

    def __init__(self, work: Callable[[list[T]], object], *, name: str, capacity: int = 1000) -> None:
        self._work = work
        self._name = name
        self._waiting: queues.Queue[list[T]] = queues.Queue(capacity)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def submit(self, items: list[T]) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        try:
            self._waiting.put_nowait(items)
        except queues.Full:
            log.warning(f"{self._name}_dropped", count=len(items))

    def _run(self) -> None:
        while True:
            items = self._waiting.get()
            while len(items) < GATHER_LIMIT:
                try:
                    items = items + self._waiting.get_nowait()
                except queues.Empty:
                    break
            try:
                close_old_connections()
                self._work(items)
            except Exception:
                log.exception(f"{self._name}_lost", count=len(items))
