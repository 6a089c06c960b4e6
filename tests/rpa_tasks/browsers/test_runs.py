"""In what state a run gives its browser back. Browser, command, guard and database are real."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.utils import translation
from django.utils.timezone import now

from rpa_tasks.admin.node import describe_warm_share
from rpa_tasks.browsers.upkeep import Prewarmer
from rpa_tasks.jobs import dispatch, wakeups
from rpa_tasks.jobs.ledger import JobLedger
from rpa_tasks.maintainer.housekeeping import Housekeeping
from rpa_tasks.models import ExecutionNode, Job, Run, Shop
from rpa_tasks.worker import runner
from scheduling.models import FailedTask
from tests.rpa_tasks.browsers.browser_processes import read_slot_states
from tests.rpa_tasks.core.conftest import Market
from tests.rpa_tasks.core.test_runner import script
from tests.support.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)
EVERY = ("high", "normal", "low")


@pytest.fixture
def job(pool: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", lambda _: None)
    market = Market()

    def job(text: str, **flow: Any) -> Job:
        market.flow("act", command=script(text), needs_browser=True, **flow)
        market.shop()
        return Job.objects.get(pk=market.publish(task_type="act").task_id)

    return job


def test_completed_run_keeps_its_browser(job: Callable[..., Job]) -> None:
    job("sys.exit(0)")
    assert runner.run_startable_jobs(EVERY) == 1

    assert read_slot_states() == {"pdd-s1": "idle"}


def test_timed_out_run_ends_its_browser(job: Callable[..., Job]) -> None:
    job("time.sleep(60)", timeout=timedelta(seconds=1))
    assert runner.run_startable_jobs(EVERY) == 1

    assert Job.objects.get().reason == "timeout"
    assert read_slot_states() == {}


def test_run_that_cannot_pin_its_shop_gives_its_browser_back(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OperationalError("the connection was lost")

    job("sys.exit(0)")
    with monkeypatch.context() as outage:
        outage.setattr(JobLedger, "pin_to_node", fail)
        assert runner.run_startable_jobs(EVERY) == 1
    assert Job.objects.get().runs.get().reason == "internal_error"

    Job.objects.update(due_at=now())
    assert runner.run_startable_jobs(EVERY) == 1
    assert Job.objects.get().state == "succeeded"


def test_run_with_lost_lease_ends_its_browser(job: Callable[..., Job], tmp_path: Path) -> None:
    job(f"open('{tmp_path}/began', 'w'); time.sleep(60)")

    def rescue() -> None:
        try:
            eventually((tmp_path / "began").exists, "the command did not begin")
            with transaction.atomic():  # the run renews no lease in between
                Job.objects.update(lease_until=now() - timedelta(hours=1))
                assert dispatch.rescue_expired_runs() == 1
        finally:
            connection.close()

    rescuer = Thread(target=rescue)
    rescuer.start()
    runner.run_startable_jobs(("high", "normal"))
    rescuer.join()

    assert [run.reason for run in Job.objects.get().runs.all()] == ["worker_lost"]
    assert read_slot_states() == {}


def test_run_on_fresh_node_finds_prewarmed_browser(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", lambda _: None)
    market = Market()
    market.flow("act", command=script("sys.exit(0)"), needs_browser=True)
    market.shop(browser={"window": "800x600"})
    market.publish(task_type="act", delay=timedelta(minutes=1))
    prewarmer = Prewarmer()
    Housekeeping(list(EVERY), prewarmer).choose_next_shops()
    prewarmer.prewarm()
    assert read_slot_states() == {"pdd-s1": "idle"}

    Job.objects.update(due_at=now(), planned_at=now())
    assert runner.run_startable_jobs(EVERY) == 1
    assert [run.warm for run in Run.objects.all()] == [True]
    node = ExecutionNode(name=settings.AFTERTOUCH_NODE)
    with translation.override("en"):
        assert describe_warm_share(node) == "100 % (1 of 1)"


def test_run_without_working_proxy_does_not_start_its_command(job: Callable[..., Job], tmp_path: Path) -> None:
    made = job(f"open('{tmp_path}/began', 'w')", retry_delays=[])
    Shop.objects.update(browser={"proxy_url": "http://127.0.0.1:9"})
    assert runner.run_startable_jobs(EVERY) == 1

    made.refresh_from_db()
    assert (made.state, made.reason) == ("failed", "proxy_failed")
    assert FailedTask.objects.count() == 1
    assert "AFTERTOUCH_ALLOWED_PRIVATE_HOSTS" in made.runs.get().detail
    assert not (tmp_path / "began").exists()
    assert read_slot_states() == {}
