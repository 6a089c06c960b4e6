"""A node without a web process exports its watcher's metrics through a collector."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
import requests

from config.environment import ROOT, environment
from config.local.processes import select_port, wait_until
from scheduling.metrics import versions
from tests.faults.brokers import Server
from tests.scheduling.api.serving import database_url
from tests.support.waiting import WAIT_LIMIT


@pytest.mark.django_db(transaction=True)
def test_serve_metrics_reports_processes_of_its_node(tmp_path: Path, valkey: redis.Redis) -> None:
    env = {
        **os.environ, "AFTERTOUCH_METRICS_DIR": str(tmp_path / "metrics"), "AFTERTOUCH_STATE_DIR": str(tmp_path),
        "DJANGO_SETTINGS_MODULE": "config.settings.local", "DATABASE_URL": database_url(),
        "REDIS_URL": environment().redis,
    }  # fmt: skip
    ours, python, django, celery = versions()
    build = f'aftertouch_build_info{{celery="{celery}",django="{django}",python="{python}",version="{ours}"}} 1.0'
    port = select_port()
    heard = [""]

    def tells(*lines: str) -> bool:
        try:
            told = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_LIMIT)
        except (requests.ConnectionError, requests.Timeout):
            return False
        heard[0] = told.text
        return told.status_code == 200 and set(lines) <= set(told.text.splitlines())

    with ExitStack() as running:
        for words in (["serve_metrics", "--port", str(port), "--cluster"], ["watch_sessions"]):
            server = Server([sys.executable, str(ROOT / "manage.py"), *words], tmp_path / f"{words[0]}.log", env)
            server.start()
            running.callback(server.kill)
        of_house = ('celery_queue_length{queue_name="touch.high"} 0.0', "aftertouch_watchers 1.0")
        assert wait_until(
            lambda: tells('aftertouch_processes{kind="watcher"} 1.0', build, *of_house), WAIT_LIMIT, pause=0.2
        ), heard[0] + server.log.read_text()
        server.kill()  # the watcher: its series goes with it
        assert wait_until(lambda: tells(*of_house[:1]) and 'watcher"}' not in heard[0], WAIT_LIMIT, pause=0.2), heard[0]
        assert build not in heard[0]
