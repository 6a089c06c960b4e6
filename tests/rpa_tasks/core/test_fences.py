"""What a run that lost its claim may still write: nothing. Whose locks the rescue passes over."""

from datetime import timedelta

import psycopg
import pytest
from django.db import connection, transaction
from django.utils.timezone import now

from rpa_tasks.jobs import dispatch, publish
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.models import Breaker, Evidence, Job, Lane, LoginState, Run, Shop
from rpa_tasks.outcomes import RunOutcome
from scheduling.ledger.transitions import Settlement
from scheduling.models import FailedTask
from tests.scheduling.api.serving import database_url
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def task_id(market):
    """A job of a shop, for a flow that may be repeated."""
    market.flow()
    market.shop()
    return market.publish().task_id


@pytest.mark.django_db(transaction=True)
def test_rescue_leaves_a_run_whose_lane_is_locked(market):
    market.pick()
    Job.objects.update(lease_until=now() - timedelta(seconds=1))
    with psycopg.connect(database_url()) as other:
        other.execute("SELECT FROM rpa_tasks_lane FOR NO KEY UPDATE")
        assert dispatch.rescue_expired_runs() == 0
        assert Job.objects.get().state == "running"
    assert dispatch.rescue_expired_runs() == 1


@pytest.mark.django_db(transaction=True)
def test_locks_of_lost_node_are_released_by_timeout(market):
    """The rescue passes over rows that are locked, so a vanished node must not keep them."""
    assert market.pick()
    Job.objects.update(lease_until=now() - timedelta(seconds=1))
    with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": psycopg.ClientCursor}) as gone:
        ((given,),) = gone.execute("SHOW idle_in_transaction_session_timeout").fetchall()
        assert given == "1min"
        gone.execute("SELECT FROM rpa_tasks_job FOR NO KEY UPDATE")
        assert dispatch.rescue_expired_runs() == 0
        gone.execute("SET LOCAL idle_in_transaction_session_timeout = '1s'")  # all that this test shortens
        with transaction.atomic():
            Job.objects.select_for_update(no_key=True).get()  # waits until the database has ended it
        assert dispatch.rescue_expired_runs() == 1
        gone.close()
    assert Job.objects.get().state == "scheduled"


@each_row("outcome", list(RunOutcome))
def test_late_settlement_of_rescued_run_writes_nothing(market, outcome):
    stale = market.pick()
    Job.objects.update(lease_until=now() - timedelta(seconds=1))
    assert dispatch.rescue_expired_runs() == 1
    holder = market.pick()
    assert holder.claim.task_id == stale.claim.task_id
    before = Job.objects.values().get()
    breaker, lane = Breaker.objects.values().get(), Lane.objects.values().get()

    assert not job_ledger.renew(stale.claim, lease=timedelta(minutes=1))
    assert not job_ledger.settle(stale.claim, Settlement("succeeded"))
    assert not market.settle(stale, outcome, "late", detail="late", result={"late": 1}, evidence={"log": b"x"})

    assert Job.objects.values().get() == before
    assert (Breaker.objects.values().get(), Lane.objects.values().get()) == (breaker, lane)
    assert lane["task_id"] == holder.claim.task_id
    assert not Run.objects.exists()
    assert not Evidence.objects.exists()
    assert not FailedTask.objects.exists()
    assert Shop.objects.get().login_state == LoginState.OK


def test_mark_sending_after_cancel_starts_nothing(market, task_id):
    """The job is claimed and waits for its browser when the cancellation is answered."""
    pick = market.pick()
    publish.request_cancel(task_id, by="ann")
    assert not job_ledger.mark_sending(pick.claim)
    assert market.settle(pick, "held", "stale")
    assert Job.objects.get().state == "cancelled"
