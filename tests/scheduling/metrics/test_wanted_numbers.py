"""The wanted numbers from real servers: equal in all processes, shared memory, unavailable sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.db import OperationalError, connections
from django.utils.timezone import now
from pytest_django import Settings
from redis.exceptions import RedisError

from rpa_tasks.models import ExecutionNode
from scheduling.db_timeouts import Deadline
from scheduling.ids import new_id
from scheduling.models import Touch
from scheduling.monitoring import wanted_numbers
from scheduling.monitoring.worker_reports import (
    WORKER_REPORTS,
    WorkerReport,
    list_worker_reports,
    remove_worker_report,
    send_worker_report,
)
from scheduling.policy.scaling import Need, Scale
from tests.scheduling.metrics.test_collectors import read_cluster_metrics
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)
NEED = Need(3, "busy", "much to do")


@pytest.fixture(autouse=True)
def empty_redis(valkey: redis.Redis) -> Any:
    return valkey


@pytest.fixture
def measured(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[Need]:
    """Only workers are asked for; the list holds what each measurement finds, the last one for ever."""
    needs = [NEED]
    settings.SCALING = {"workers": "scheduling.monitoring.wanted_numbers.measure_workers"}
    settings.SCALING_LIMITS = {"workers": (1, 10)}
    monkeypatch.setattr(wanted_numbers, "measure_workers", lambda _: (1, needs.pop(0) if len(needs) > 1 else needs[0]))
    return needs


def read_workers() -> Scale:
    return wanted_numbers.read_scaling(Deadline(60.0))["workers"]


def pass_seconds(valkey: redis.Redis, seconds: float) -> None:
    """Shift the stored memory into the past, by the database's clock."""
    stored = json.loads(valkey.get("at:scaling:workers"))
    stored["at"] -= seconds
    stored["needs"] = [[at - seconds, count] for at, count in stored["needs"]]
    valkey.set("at:scaling:workers", json.dumps(stored))


# --- memory -------------------------------------------------------------------------------------------------------


def test_answer_holds_for_some_seconds_and_then_is_measured_again(
    measured: list[Need], valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wanted_numbers, "ANSWER_KEPT", 120.0)  # a slow machine asks twice within it
    measured[:] = [NEED, Need(7, "late", "")]
    assert (read_workers().wanted, read_workers().wanted) == (3, 3)
    pass_seconds(valkey, wanted_numbers.ANSWER_KEPT)
    assert (read_workers().wanted, read_workers().code) == (7, "late")


def test_wanted_number_falls_after_the_hold_by_the_shared_memory(
    measured: list[Need], valkey: redis.Redis, settings: Settings
) -> None:
    settings.AFTERTOUCH_SCALE_DOWN_AFTER = timedelta(minutes=2)
    measured[:] = [Need(7, "late", ""), NEED]
    assert read_workers().wanted == 7
    pass_seconds(valkey, 60)
    assert (read_workers().wanted, read_workers().code) == (7, "held")
    pass_seconds(valkey, 61)
    assert (read_workers().wanted, read_workers().code) == (3, "busy")


def test_processes_that_ask_at_once_give_one_answer(measured: list[Need], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measures something else, and all of them measure before the first answer is stored."""
    threads = 8
    numbers = iter(range(2, 2 + threads))
    with ThreadPoolExecutor(threads) as pool:
        from threading import Barrier

        all_measured = Barrier(threads)

        def measure(_: Deadline) -> tuple[int, Need]:
            all_measured.wait(60)
            return 1, Need(next(numbers), "busy", "")

        monkeypatch.setattr(wanted_numbers, "measure_workers", measure)

        def read() -> Scale:
            try:
                return read_workers()
            finally:
                connections["default"].close()

        answers = {work.result(60) for work in [pool.submit(read) for _ in range(threads)]}
    assert len(answers) == 1
    assert answers == {read_workers()}


def test_flushed_redis_keeps_what_runs(
    measured: list[Need], valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wanted_numbers, "measure_workers", lambda _: (6, NEED))
    assert (read_workers().wanted, read_workers().code) == (6, "held")
    valkey.flushall()
    assert read_workers().wanted == 6


# --- unavailable sources -------------------------------------------------------------------------------------------


def test_source_without_answer_hides_only_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> Any:
        raise RedisError("away")

    monkeypatch.setattr(wanted_numbers, "list_worker_reports", away)
    found = wanted_numbers.read_scaling(Deadline(60.0))
    assert (found["workers"].wanted, found["workers"].running, found["workers"].code) == (None, None, "no_answer")
    assert found["execution_nodes"].wanted == 1
    metrics = read_cluster_metrics()
    assert "aftertouch_workers_wanted" not in metrics
    assert metrics["aftertouch_watchers_wanted"] == 1


def test_redis_without_answer_leaves_no_number(settings: Settings) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert {answer.wanted for answer in wanted_numbers.read_scaling(Deadline(60.0)).values()} == {None}


def test_database_without_answer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> Any:
        raise OperationalError("away")

    monkeypatch.setattr(wanted_numbers.sql, "now", away)
    with pytest.raises(OperationalError):
        wanted_numbers.read_scaling(Deadline(60.0))


# --- workers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def due_touches(matrix: MatrixBuilder, record_event: RecordEvent) -> Callable[..., None]:
    """Copy a planned touch `count` times, due some seconds ago."""
    matrix.node("guide", delay=timedelta(days=1))
    record_event()
    row = Touch.objects.values().get()

    def copy(count: int, *, seconds: float, **changes: Any) -> None:
        given = {**row, "due_at": now() - timedelta(seconds=seconds)} | changes
        given.pop("task_id")
        Touch.objects.bulk_create(Touch(task_id=(one := new_id()), **{**given, "retry_of": one}) for _ in range(count))

    return copy


def test_measured_workers_count_due_touches_that_nothing_has_started(due_touches: Callable[..., None]) -> None:
    send_worker_report(WorkerReport("core@a", processes=2, busy=1.0, queues=["touch.high"]))
    send_worker_report(WorkerReport("core@b", processes=6, busy=0.6, queues=["touch.high"]))
    lease = now() + timedelta(seconds=30)
    due_touches(4, seconds=2)
    due_touches(3, seconds=5, state="queued", lease_until=lease)
    due_touches(2, seconds=900, paused_by="all")
    due_touches(2, seconds=900, state="running", lease_until=lease)
    due_touches(2, seconds=900, state="delivered", settled_at=now() - timedelta(seconds=60))
    due_touches(2, seconds=-60)
    running, need = wanted_numbers.measure_workers(Deadline(60.0))
    assert running == 2
    assert (need.count, need.code) == (4, "late")
    assert 5 <= float(need.text.split()[-2]) < 900


def test_measured_backlog_beside_idle_workers_adds_none(due_touches: Callable[..., None]) -> None:
    send_worker_report(WorkerReport("core@a", processes=2, busy=0.1, queues=["touch.high"]))
    due_touches(500, seconds=20, priority=0)
    running, need = wanted_numbers.measure_workers(Deadline(60.0))
    assert (running, need.count) == (1, 1)
    remove_worker_report(WorkerReport("core@a", processes=2, busy=0.1, queues=["touch.high"]))
    assert wanted_numbers.measure_workers(Deadline(60.0))[1].code == "backlog"


def test_report_of_a_worker_expires(valkey: redis.Redis) -> None:
    send_worker_report(WorkerReport("core@a", processes=2, busy=1.0, queues=["touch.high"]))
    ((key, text),) = valkey.hgetall(WORKER_REPORTS).items()
    stored = json.loads(text)
    valkey.hset(WORKER_REPORTS, key, json.dumps({**stored, "at": stored["at"] - 20}))
    assert list_worker_reports() == []
    send_worker_report(WorkerReport("core@b", processes=1, busy=0.5, queues=["touch.high"]))
    assert [json.loads(text)["name"] for text in valkey.hvals(WORKER_REPORTS)] == ["core@b"]


# --- other kinds --------------------------------------------------------------------------------------------------


def test_metrics_have_the_wanted_numbers() -> None:
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=now(), slots=5, queues=["high"])
    found = read_cluster_metrics()
    assert found["aftertouch_workers_wanted"] == 1
    assert found["aftertouch_execution_nodes_wanted"] == 1
    assert found["aftertouch_watchers_wanted"] == 1
