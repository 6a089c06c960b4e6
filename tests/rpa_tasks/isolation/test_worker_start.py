"""What a worker logs about its isolation when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_django import Settings
from structlog.testing import capture_logs

from config.celery.application import require_isolation
from config.environment import ROOT
from rpa_tasks import isolation, shop_uids

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give commands a uid of their own")
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def start(*queues: str) -> list[Any]:
    """The lines that the hook of a worker with these queues logs."""
    worker = SimpleNamespace(app=SimpleNamespace(amqp=SimpleNamespace(queues=SimpleNamespace(consume_from=queues))))
    with capture_logs() as lines:
        require_isolation("worker", worker, None)
    return lines


@pytest.fixture(autouse=True)
def by_uid(settings: Settings) -> None:
    settings.AFTERTOUCH_RPA_ISOLATION = isolation.UID


def test_worker_start_uids_that_users_can_take_are_logged(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "subuid").write_text("ann:700000:1\n")
    monkeypatch.setattr(shop_uids, "SUBORDINATE", (str(tmp_path / "subuid"),))
    settings.AFTERTOUCH_RPA_UIDS = (700_000, 799_999)

    (line,) = start("high")

    assert (line["event"], line["log_level"], line["check"]) == ("isolation_incomplete", "warning", "rpa_tasks.W005")
    assert "AFTERTOUCH_RPA_UIDS" in line["detail"]
    assert "ann:700000:1" in line["detail"]
    assert start("touch.high") == []  # it runs no commands


def test_worker_start_without_gaps_logs_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shop_uids, "SUBORDINATE", ())
    assert start("high") == []


def test_worker_process_logs_ports_of_browsers_among_those_of_flows(tmp_path: Path) -> None:
    if not isolation.limits_ports():
        pytest.skip("this kernel has no Landlock rules for ports (Linux 6.7)")
    ports = RANGE.read_text().split()
    command = [sys.executable, "-m", "celery", "-A", "config", "worker", "-Q", "high", "-c", "1", "-P", "solo"]
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "DJANGO_SETTINGS_MODULE": "config.settings.local",
        "AFTERTOUCH_STATE_DIR": str(tmp_path), "AFTERTOUCH_RPA_ISOLATION": "uid",
        "AFTERTOUCH_RPA_PORTS": f"{ports[0]}-{ports[0]}", "DATABASE_URL": "postgresql://x@127.0.0.1:1/x",
        "REDIS_URL": "redis://127.0.0.1:1/0",
    }  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as worker:
        assert worker.stdout
        # It looks for its broker after the hook.
        line = next((line for line in worker.stdout if "isolation_incomplete" in line or "Cannot connect" in line), "")
        worker.kill()
    assert "AFTERTOUCH_RPA_PORTS" in line
    assert "rpa_tasks.W004" in line
