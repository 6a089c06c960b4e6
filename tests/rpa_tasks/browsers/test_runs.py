"""In what state a run gives its browser back. Browser, command, guard and database are real."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from django.db import connection
from django.utils.timezone import now

from rpa_tasks.jobs import dispatch
from rpa_tasks.models import Job
from rpa_tasks.worker import runner
from tests.rpa_tasks.browsers.browser_processes import eventually, read_slot_states
from tests.rpa_tasks.core.conftest import Market
from tests.rpa_tasks.core.test_runner import script

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]
EVERY = ("high", "normal", "low")


@pytest.fixture
def job(pool: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    from rpa_tasks.jobs import wakeups

    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", lambda _: None)
    market = Market()

    def job(text: str, **flow: Any) -> Job:
        market.flow("act", command=script(text), needs_browser=True, **flow)
        market.shop()
        return Job.objects.get(pk=market.publish(task_type="act").task_id)

    return job


def test_completed_run_keeps_its_browser(job: Any) -> None:
    job("sys.exit(0)")
    assert runner.run_startable_jobs(EVERY) == 1

    assert read_slot_states() == {"pdd-s1": "idle"}


def test_timed_out_run_ends_its_browser(job: Any) -> None:
    job("time.sleep(60)", timeout=timedelta(seconds=1))
    assert runner.run_startable_jobs(EVERY) == 1

    assert Job.objects.get().reason == "timeout"
    assert read_slot_states() == {}


def test_run_with_lost_lease_ends_its_browser(job: Any, tmp_path: Path) -> None:
    job(f"open('{tmp_path}/began', 'w'); time.sleep(60)")

    def rescue() -> None:
        try:
            eventually((tmp_path / "began").exists, "the command did not begin")
            Job.objects.update(lease_until=now() - timedelta(seconds=1))
            assert dispatch.rescue_expired_runs() == 1
        finally:
            connection.close()

    rescuer = Thread(target=rescue)
    rescuer.start()
    runner.run_startable_jobs(("high", "normal"))
    rescuer.join()

    assert [run.reason for run in Job.objects.get().runs.all()] == ["worker_lost"]
    assert read_slot_states() == {}
