"""Which workers are elastic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from pytest_django import Settings

from config.celery import autoscaler
from config.celery.autoscaler import PoolScaler, ScalingWorker
from scheduling.queue_names import CORE_QUEUES, RPA_QUEUES


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
