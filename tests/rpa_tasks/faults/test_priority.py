"""A thousand jobs of low priority wait: an urgent one starts next, and the low ones still get their turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rpa_tasks.faults.effect_log import find_overlaps
from tests.rpa_tasks.faults.rpa_cluster import Market, RpaCluster

pytestmark = pytest.mark.faults

LOW, SHOPS, SLOTS = 1_000, 50, 2
HIGH, AGEING = 40, 1.5


def publish_low_jobs(market: Market) -> list[str]:
    shops = len(market.shops)
    orders = [
        market.order(
            market.shops[number % shops], "act", dedupe_key=f"low-{number}", priority=2, payload={"hold": 0.05}
        )
        for number in range(LOW)
    ]
    return [str(answer["task"]) for answer in market.cluster.publisher.ask(*orders)]


def test_high_job_starts_before_a_thousand_low_jobs(
    rpa_cluster: RpaCluster, report_line: Callable[[str], None]
) -> None:
    market = rpa_cluster.market(SHOPS, act={"idempotent": True})
    assert len(set(publish_low_jobs(market))) == LOW
    with rpa_cluster.node("steady", slots=SLOTS):
        rpa_cluster.wait(lambda: len(market.log.effects()) >= 10, "low ones run")
        high = market.publish(market.shops[7], "act", dedupe_key="high", priority=0)
        rpa_cluster.await_state(high, "succeeded", timeout=30)
    ((count,),) = (row.values() for row in rpa_cluster.sql(_BETWEEN, [high]))
    report_line(f"{LOW - len(market.log.effects()) + 1} low jobs wait · a high one started after {count} of them")
    assert count <= SLOTS  # who had picked in the moment of its publication
    assert not find_overlaps(market.log.effects())


def test_low_jobs_start_under_high_load(rpa_cluster: RpaCluster, report_line: Callable[[str], None]) -> None:
    """Urgent ones keep the only slot busy for longer than a low one needs to become urgent by waiting."""
    market = rpa_cluster.market(5, act={"idempotent": True})
    *busy, quiet = market.shops
    orders = [
        market.order(busy[number % 4], "act", dedupe_key=f"high-{number}", priority=0, payload={"hold": 0.15})
        for number in range(HIGH)
    ]
    # Behind the urgent ones: the node runs already, and would begin with whatever is there alone.
    orders += [market.order(quiet, "act", dedupe_key=f"low-{number}", priority=2) for number in range(2)]
    with rpa_cluster.node("ageing", slots=1, env={"AFTERTOUCH_RPA_AGEING": f"PT{AGEING}S"}):
        tasks = [str(answer["task"]) for answer in rpa_cluster.publisher.ask(*orders)]
        rpa_cluster.wait(lambda: not rpa_cluster.unsettled(tasks), "all end", 240)
        waited = [rpa_cluster.sql(_WAITED, [task])[0]["waited"] for task in tasks[-2:]]
    order = [effect.task for effect in market.log.effects()]
    places = [order.index(task) for task in tasks[-2:]]
    report_line(
        f"{HIGH} high jobs keep one slot busy · ageing {AGEING} s: of all runs, two low ones were the "
        f"{places[0] + 1}th and {places[1] + 1}th"
    )
    assert len(order) == len(tasks)
    assert min(waited) >= 2 * AGEING  # two levels; by then few or many have run, as the machine is
    assert max(places) < len(order) - 3


_WAITED = """
SELECT extract(epoch FROM run.started_at - job.planned_at)::float AS waited
FROM rpa_tasks_run AS run JOIN rpa_tasks_job AS job ON job.task_id = run.job_id WHERE job.task_id = %s
"""
_BETWEEN = """
SELECT count(*)
FROM rpa_tasks_run AS run JOIN rpa_tasks_job AS job ON job.task_id = run.job_id
JOIN rpa_tasks_job AS high ON high.task_id = %s JOIN rpa_tasks_run AS its ON its.job_id = high.task_id
WHERE job.priority = 2 AND run.started_at > high.created_at AND run.started_at < its.started_at
"""
