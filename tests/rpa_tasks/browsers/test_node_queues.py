"""Several execution workers of one node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery.app.amqp import AMQP
from pytest_django import Settings

from config.celery.application import app, consume_node_queues
from config.environment import ROOT
from rpa_tasks.browsers import registry
from rpa_tasks.maintainer import housekeeping
from rpa_tasks.models import ExecutionNode
from rpa_tasks.worker import node

WORKER = """
import sys, django
django.setup()
from rpa_tasks.worker import node
node.record_worker(sys.argv[1].split(","), int(sys.argv[2]))
print(1, flush=True)
sys.stdin.read()
"""
Begin = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def worker(state: Path) -> Iterator[Begin]:
    """Another worker of this node, which has noted its queues."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(queues: str, processes: int = 0) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, queues, str(processes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
                env={**os.environ, "AFTERTOUCH_STATE_DIR": str(state)},
            )
        )  # fmt: skip
        assert started[-1].stdout
        assert started[-1].stdout.readline() == b"1\n"
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.django_db
def test_node_reports_queues_of_workers(worker: Begin, settings: Settings) -> None:
    worker("s.pdd.big,high")
    leaves = worker("low")
    doing = housekeeping.Housekeeping(["high", "normal"])

    def queues() -> set[str]:
        doing.report()
        return set(ExecutionNode.objects.get(name=settings.AFTERTOUCH_NODE).queues)

    assert queues() == {"high", "normal", "low", "s.pdd.big"}
    leaves.kill()
    leaves.wait()
    assert queues() == {"high", "normal", "low", "s.pdd.big"}  # it may be back in a moment

    settings.AFTERTOUCH_RPA_HOME_LEASE = timedelta(0)
    assert queues() == {"high", "normal", "s.pdd.big"}
    assert len(list(registry.workers_dir().iterdir())) == 1


def test_slots_of_a_stopped_worker_do_not_count(worker: Begin, settings: Settings) -> None:
    """A restart leaves the record of the former worker, so that the node keeps its shops."""
    settings.AFTERTOUCH_RPA_SLOTS = 5
    former = worker("high", 2)
    worker("high", 1)
    assert node.count_slots() == 3
    former.kill()
    former.wait()
    assert node.count_slots() == 1
    assert node.served_queues() == ["high"]


def test_queues_of_a_stopped_worker_end_after_the_clock_was_set_back(worker: Begin) -> None:
    former = worker("low")
    (registry.workers_dir() / "notes.json").write_text("")  # no record
    former.kill()
    former.wait()
    assert node.served_queues() == ["low"]
    for record in registry.workers_dir().iterdir():
        os.utime(record, (time.time() + 86_400, time.time() + 86_400))
    assert node.served_queues() == []


def test_worker_consumes_only_node_queues_of_its_tiers(settings: Settings) -> None:
    """It could do nothing with them, and they would be gone."""
    settings.AFTERTOUCH_NODE = "n1"
    amqp = AMQP(app)
    amqp.queues.select(["high", "ticks"])
    consume_node_queues(sender="w", instance=SimpleNamespace(app=SimpleNamespace(amqp=amqp)), conf=None)
    assert set(amqp.queues.consume_from) == {"high", "ticks", "n.n1.high"}
