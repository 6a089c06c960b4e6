"""Two execution nodes cannot have one name; a node that crashed keeps its own."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
from django.utils.timezone import now

from config.environment import ROOT, environment
from rpa_tasks.jobs.ledger import NODE_SILENT
from rpa_tasks.models import ExecutionNode
from rpa_tasks.worker import node
from rpa_tasks.worker.node import claim_node_name, read_state_id
from tests.scheduling.api.serving import database_url

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def claim_on(settings, tmp_path):
    """Claim the name `n1` on a machine."""

    def claim_on(machine):
        settings.AFTERTOUCH_STATE_DIR, settings.AFTERTOUCH_NODE = tmp_path / machine, "n1"
        return claim_node_name()

    return claim_on


def test_second_machine_with_a_name_that_is_renewed_is_refused(claim_on):
    assert claim_on("first")
    ExecutionNode.objects.update(queues=["high"], slots=3, draining_at=now(), drained_by="ops")
    assert not claim_on("second")
    assert claim_on("first"), "the crashed node restarts at once"
    node = ExecutionNode.objects.get()
    assert (node.queues, node.slots, node.drained_by) == (["high"], 3, "ops"), "it keeps what it has reported"
    ExecutionNode.objects.update(seen_at=now() - NODE_SILENT - timedelta(seconds=1))
    assert claim_on("second"), "the first has been silent for long"
    assert not claim_on("first")


def test_one_of_machines_that_ask_at_once_gets_the_name(race, monkeypatch, settings, tmp_path):
    settings.AFTERTOUCH_STATE_DIR = tmp_path
    ids = iter(range(8))
    monkeypatch.setattr(node, "read_state_id", lambda _: f"machine {next(ids)}")
    assert sum(race(8, lambda _: claim_node_name())) == 1


def test_readers_of_a_new_state_directory_agree_on_its_id(race, tmp_path):
    assert len(set(race(8, lambda _: read_state_id(tmp_path / "new")))) == 1
    assert os.listdir(tmp_path / "new") == ["node.id"]


def test_worker_with_a_taken_name_does_not_start(claim_on, tmp_path):
    assert claim_on("first")
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "config", "worker", "-Q", "high", "-c", "1", "-n", "second@test"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
        env={
            **os.environ, "DATABASE_URL": database_url(), "REDIS_URL": environment().redis, "AFTERTOUCH_NODE": "n1",
            "AFTERTOUCH_STATE_DIR": str(tmp_path / "second"), "AFTERTOUCH_RPA_ISOLATION": "none",
        },
    )  # fmt: skip
    assert done.returncode != 0
    assert "AFTERTOUCH_NODE: another execution node that runs is named n1" in done.stdout + done.stderr
