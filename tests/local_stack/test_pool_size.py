"""How many processes a worker has: quickly more, slowly fewer."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from pytest_django import Settings

from config.celery import autoscaler
from config.celery.autoscaler import MAX_WAIT, SCALE_INTERVAL, PoolScaler
from tests.support.tables import each_row

LEAST, MOST = 1, 8
CALM = 30.0


class Scaler(PoolScaler):
    def _shrink(self, n: int) -> None:
        self.pool.shrink(n)


class Pool:
    """A pool of a worker whose clock and messages the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processes: int, least: int = LEAST) -> None:
        self.num_processes, self.now = processes, 1000.0
        self.received: list[int] = []
        monkeypatch.setattr(autoscaler, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(autoscaler, "state", SimpleNamespace(reserved_requests=self.received))
        worker = Mock(hostname="core@test")
        self.scaler = Scaler(self, max_concurrency=MOST, min_concurrency=least, worker=worker)

    def grow(self, n: int) -> None:
        self.num_processes += n

    def shrink(self, n: int) -> None:
        self.num_processes -= n

    def maintain_pool(self) -> None:
        """The processes exist at once."""

    def run(self, loads: Iterable[int]) -> list[int]:
        """Return the sizes after each half second in which so many messages ran or waited."""
        sizes = []
        for load in loads:
            self.now += SCALE_INTERVAL
            self.received[:] = range(load)
            self.scaler.maybe_scale()
            sizes.append(self.num_processes)
        return sizes


@pytest.fixture(autouse=True)
def calm(settings: Settings) -> None:
    settings.AFTERTOUCH_WORKER_SHRINK_AFTER = timedelta(seconds=CALM)


LONG = int(MAX_WAIT / SCALE_INTERVAL)


@each_row(
    "processes, loads, expected",
    [
        (2, [8] * LONG, 4),  # it doubles at most
        (2, [3] * LONG, 3),
        (4, [13] * LONG, MOST),
        (7, [16] * LONG, MOST),
        (MOST, [17] * LONG, MOST),
        (2, [8] * (LONG - 1), 2),  # they wait briefly
        (2, [8, 8, 2] * 4, 2),  # it keeps up
        (2, [2] * 20, 2),  # none waits
    ],
)
def test_pool_grows_while_messages_wait(
    monkeypatch: pytest.MonkeyPatch, processes: int, loads: list[int], expected: int
) -> None:
    assert Pool(monkeypatch, processes).run(loads)[-1] == expected


def test_pool_shrinks_by_one_after_spare_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Pool(monkeypatch, 4, least=2).run([1] * 240)
    assert sizes[-1] == 2
    first, second = (sizes.index(size) * SCALE_INTERVAL for size in (3, 2))
    assert CALM - 1 < first < CALM + 1
    assert first + CALM / 5 < second < first + CALM / 2


def test_pool_keeps_its_size_after_full_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, 2)
    assert set(pool.run([0] * 50 + [2] + [0] * 50)) == {2}
    assert pool.run([0] * 10)[-1] == 1


def test_pool_keeps_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(Pool(monkeypatch, LEAST).run([0] * 500)) == {LEAST}
