"""Act over other database connections, like other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

import pytest
from django.db import connection, transaction

from config.local.processes import wait_until
from scheduling import sql
from tests.support.waiting import WAIT_LIMIT

Answer = TypeVar("Answer")


class Race(Protocol):
    """Call `act` `count` times at the same moment, each with its own connection. Return the results in order."""

    def __call__(self, count: int, act: Callable[[int], Answer]) -> list[Answer]: ...


class SecondConnection(Protocol):
    """Call `act` over a second connection and wait for it."""

    def __call__(self, act: Callable[[], Answer]) -> Answer: ...


def act_on_second_connection(act: Callable[[], Answer]) -> Answer:
    """Call `act` in a thread with its own connection, and wait for it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act_and_close, act).result(WAIT_LIMIT)


def act_and_close(act: Callable[[], Answer]) -> Answer:
    try:
        return act()
    finally:
        connection.close()


def run_concurrently(count: int, act: Callable[[int], Answer]) -> list[Answer]:
    """Call `act` with each number at the same moment, each in a thread with its own connection."""
    start = threading.Barrier(count)

    def run(number: int) -> Answer:
        start.wait(WAIT_LIMIT)
        return act_and_close(partial(act, number))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def act_behind_locks(lock: Callable[[], object], *acts: Callable[[], Answer]) -> list[Answer]:
    """Call `lock` in a transaction that ends after all `acts`, each over its own connection, wait for locks.

    Return the results of the acts in order.
    """
    with ThreadPoolExecutor(len(acts)) as pool:
        with transaction.atomic():
            lock()
            acting = [pool.submit(act_and_close, act) for act in acts]
            await_lock_waits(len(acts))
        return [each.result(WAIT_LIMIT) for each in acting]


def await_lock_waits(count: int = 1) -> None:
    """Wait until so many sessions of this database wait for a lock."""
    assert wait_until(lambda: count_lock_waits() >= count, WAIT_LIMIT, 0.01)


def count_lock_waits() -> int:
    """Count over another connection: a transaction reads the statistics once."""
    return act_on_second_connection(lambda: int(sql.rows(_LOCK_WAITS, {})[0][0]))


_LOCK_WAITS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


@pytest.fixture
def second_connection() -> SecondConnection:
    return act_on_second_connection


@pytest.fixture
def race() -> Race:
    return run_concurrently
