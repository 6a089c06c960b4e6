"""How many processes a worker has: quickly more, slowly fewer. Which workers are elastic."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from pytest_django import Settings

from config.celery import autoscaler
from config.celery.autoscaler import MAX_WAIT, SCALE_INTERVAL, PoolScaler, ScalingWorker
from scheduling.queue_names import CORE_QUEUES, RPA_QUEUES
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


# --- which workers are elastic ---


def bounds(settings: Settings, queues: str, most: int | None = 6, pool: str = "prefork", **options: Any) -> Any:
    """What a worker of these queues is given as its autoscale option."""
    settings.AFTERTOUCH_WORKER_MIN, settings.AFTERTOUCH_WORKER_MAX = 2, most
    worker = ScalingWorker.__new__(ScalingWorker)
    worker.pool_cls = pool
    return worker.prepare_args(queues=queues, **options).get("autoscale")


def set_cores(monkeypatch: pytest.MonkeyPatch, cores: int, quota: str = "max 100000") -> None:
    monkeypatch.setattr(autoscaler, "CPU_QUOTA", SimpleNamespace(read_text=lambda _: f"{quota}\n"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))


def test_only_core_worker_is_elastic(settings: Settings) -> None:
    """A run needs a browser: more processes would not find one."""
    assert [bounds(settings, queues) for queues in (",".join(CORE_QUEUES), CORE_QUEUES[0])] == [[6, 2]] * 2
    others = ("", RPA_QUEUES[0], f"{CORE_QUEUES[0]},{RPA_QUEUES[0]}")
    assert [bounds(settings, queues) for queues in others] == [None] * 3
    assert bounds(settings, CORE_QUEUES[0], autoscale=[9, 3]) == [9, 3], "an option of the command line"


@pytest.mark.parametrize(
    ("cores", "quota", "expected"),
    [
        (8, "max 100000", [8, 2]),
        (64, "max 100000", [16, 2]),
        (8, "350000 100000", [3, 2]),
        (2, "max 100000", None),
        (8, "50000 100000", None),
    ],
    ids=["cores", "many cores", "quota of a container", "no core is left", "half a core"],
)
def test_core_worker_grows_to_the_cores_by_default(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, cores: int, quota: str, expected: Any
) -> None:
    set_cores(monkeypatch, cores, quota)
    assert bounds(settings, ",".join(CORE_QUEUES), most=None, concurrency=2) == expected


def test_default_growth_leaves_other_pools_and_fixed_ones(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    set_cores(monkeypatch, 8)
    assert bounds(settings, CORE_QUEUES[0], most=None, concurrency=2, pool="solo") is None
    assert bounds(settings, CORE_QUEUES[0], most=None) is None
    assert bounds(settings, CORE_QUEUES[0], most=0, concurrency=2) is None
    assert bounds(settings, RPA_QUEUES[0], most=None, concurrency=2) is None
    settings.CELERY_TASK_CREATE_MISSING_QUEUE_TYPE = "quorum"
    assert bounds(settings, CORE_QUEUES[0], most=None, concurrency=2) is None


def test_control_command_starts_processes_at_once() -> None:
    """`celery control autoscale` calls `update`. A missing process would otherwise wait for the next task."""
    pool, worker = Mock(num_processes=2), Mock()
    PoolScaler(pool, max_concurrency=4, min_concurrency=2, worker=worker).update(max=6, min=5)
    assert pool.method_calls == [call.grow(3), call.maintain_pool()]
