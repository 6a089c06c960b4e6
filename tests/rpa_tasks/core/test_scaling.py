"""Which jobs ask for a further execution node."""

from datetime import timedelta

import pytest
from django.utils.timezone import now

from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.metrics import measure_execution_nodes
from rpa_tasks.models import Job, Run, Shop
from scheduling.db_timeouts import Deadline


@pytest.fixture(autouse=True)
def flow(market):
    market.flow()


def measure():
    return measure_execution_nodes(Deadline(4.0))


def make_due(market, count, **changes):
    for number in range(count):
        shop = f"s{number}"
        market.shop(shop)
        market.publish(shop_id=shop, **changes)
    Job.objects.update(due_at=now() - timedelta(seconds=20))


def test_silent_node_does_not_count(market):
    market.node("n1")
    market.node("n2", seen_at=now() - timedelta(minutes=3))
    assert measure() == (1, 1)


def test_full_node_and_free_shops_ask_for_more(market):
    market.node()
    make_due(market, 22)
    market.pick(node="n1")
    market.pick(node="n1")
    assert measure() == (1, 3), "of 22 shops with runs of a minute two run, and 20 should start within five minutes"


def test_duration_of_the_last_runs_counts(market):
    market.node()
    make_due(market, 22)
    market.pick(node="n1")
    market.pick(node="n1")
    started = now() - timedelta(minutes=30)
    for minutes, outcome in ((5, "succeeded"), (15, "transient"), (600, "held")):
        Run.objects.create(
            job=Job.objects.all()[0], number=1, lease_no=1, started_at=started,
            ended_at=started + timedelta(minutes=minutes), outcome=outcome,
        )  # fmt: skip
    assert measure() == (1, 11), "a shop runs one job at a time, so 22 shops need no more slots"


def test_only_jobs_that_a_new_node_could_start_count(market):
    make_due(market, 5)
    Job.objects.update(due_at=now() - timedelta(hours=2))
    market.pick(node="n1")
    free = list(Shop.objects.filter(lane__task_id=None).order_by("shop_id"))
    assert startable() == [0, 4, 0]
    Shop.objects.filter(pk=free[0].pk).update(paused=True)
    Shop.objects.filter(pk=free[1].pk).update(dedicated_queue=True)
    market.publish(shop_id=free[2].shop_id, dedupe_key="urgent", priority=0)
    assert startable() == [1, 1, 0]
    assert startable(f"s.pdd.{free[1].shop_id}") == [1, 2, 0]


def startable(*queues):
    return job_ledger.count_startable(["high", "normal", "low", *queues])
