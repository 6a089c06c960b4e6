"""A node whose clock is wrong wakes, puts off and rests nothing at the wrong time: the database's clock decides."""

from datetime import timedelta

import pytest
import time_machine
from django.utils.timezone import now

from rpa_tasks.jobs import dispatch, wakeups
from rpa_tasks.jobs.dispatch import DEFER_BY_REASON, PLATFORM_DEFER
from rpa_tasks.models import Breaker, Job, Run, Shop
from rpa_tasks.outcomes import JITTER
from scheduling import sql
from scheduling.ledger.transitions import WakeUp
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db

SECONDS = timedelta(seconds=1)


@pytest.fixture(params=[10, -10], ids=["ahead", "behind"], autouse=True)
def _wrong_clock(request):
    """By ten minutes; the servers' clocks are right."""
    with time_machine.travel(now() + timedelta(minutes=request.param), tick=True):
        assert abs(now() - sql.now()) > timedelta(minutes=9)
        yield


@pytest.fixture
def pick(market):
    market.flow()
    market.shop()
    market.publish()
    found = market.pick()
    assert found is not None
    return found


def is_between(since, instant, delay, jitter=0):
    """By the database's clock, this delay after something that happened since then."""
    assert instant is not None
    return since + delay <= instant <= sql.now() + delay * (1 + jitter)


@each_row(
    "outcome, reason, delay, jitter",
    [
        ("held", "browser_wait", DEFER_BY_REASON["browser_wait"], 0),
        ("session", "exit_77", timedelta(0), 0),
        ("transient", "exit_1", 30 * SECONDS, 0.1),
    ],
)
def test_retried_run_is_due_by_database_clock(market, pick, outcome, reason, delay, jitter):
    since = sql.now()
    assert market.settle(pick, outcome, reason)
    assert is_between(since, Job.objects.get().due_at, delay, jitter)
    assert is_between(since, Run.objects.get().ended_at, timedelta(0))
    if outcome == "session":
        assert is_between(since, Shop.objects.get().login_lost_at, timedelta(0))


def test_platform_rest_ends_by_database_clock(market, pick):
    market.platform().__class__.objects.update(breaker_threshold=1)
    since = sql.now()
    assert market.settle(pick, "platform", "exit_75")
    breaker = Breaker.objects.get()
    assert is_between(since, breaker.opened_at, timedelta(0))
    assert is_between(since, breaker.open_until, timedelta(minutes=5))
    assert is_between(since, Job.objects.get().due_at, PLATFORM_DEFER)


@each_row("began", [False, True])
def test_rescued_run_is_due_by_database_clock(pick, began):
    changes = ", sending_at = statement_timestamp() - interval '1 min'" if began else ""
    sql.execute(f"UPDATE rpa_tasks_job SET lease_until = statement_timestamp() - interval '1 s'{changes}", {})
    since = sql.now()
    assert dispatch.rescue_expired_runs() == 1
    assert is_between(since, Job.objects.get().due_at, 30 * SECONDS if began else timedelta(0), JITTER)
    if began:
        assert is_between(since, Run.objects.get().ended_at, timedelta(0))


def test_valid_lease_is_not_rescued_with_wrong_node_clock(pick):
    assert dispatch.rescue_expired_runs() == 0
    assert Job.objects.get().state == "running"


def test_wakeup_is_delayed_only_until_due_time(market, pick, monkeypatch):
    published = []
    monkeypatch.setattr(wakeups, "publish_within_capacity", lambda found, nodes: published.extend(found))
    job, at = pick.claim.task_id, sql.now()
    wakeups.publish_wakeups(
        [WakeUp(job, at + 20 * SECONDS, 1, pick.shop_id), WakeUp(job, at - SECONDS, 1, pick.shop_id)]
    )
    assert [token.due_at for token in published] == [None, at + 20 * SECONDS]  # what is due first
