"""Several execution workers of one node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery.app.amqp import AMQP

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
node.record_worker(sys.argv[1].split(","))
print(1, flush=True)
sys.stdin.read()
"""
Begin = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def worker(state: Path) -> Iterator[Begin]:
    """Another worker of this node, which has noted its queues."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(queues: str) -> subprocess.Popen[bytes]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, queues], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
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
def test_node_reports_queues_of_workers(worker: Begin, settings: Any) -> None:
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


def test_unreadable_worker_record_is_ignored(state: Path, worker: Begin) -> None:
    (registry.workers_dir() / "notes.json").write_text("")
    worker("low")
    assert node.served_queues() == ["low"]


def test_worker_consumes_only_node_queues_of_its_tiers(settings: Any) -> None:
    """It could do nothing with them, and they would be gone."""
    settings.AFTERTOUCH_NODE = "n1"
    amqp = AMQP(app)
    amqp.queues.select(["high", "ticks"])
    consume_node_queues(sender="w", instance=SimpleNamespace(app=SimpleNamespace(amqp=amqp)), conf=None)
    assert set(amqp.queues.consume_from) == {"high", "ticks", "n.n1.high"}
