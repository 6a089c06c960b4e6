"""A thousand jobs of low priority wait: an urgent one starts next, and the low ones still get their turn."""

from tests.rpa_tasks.faults.effect_log import find_overlaps
from tests.rpa_tasks.faults.rpa_cluster import PATIENT

LOW, SHOPS, SLOTS = 1_000, 50, 2
HIGH, AGEING = 40, 1.5


def publish_low_jobs(market):
    orders = [
        market.order(
            market.shops[number % SHOPS], "act", dedupe_key=f"low-{number}", priority=2, payload={"hold": 0.05}
        )
        for number in range(LOW)
    ]
    (tasks,) = market.cluster.publisher.ask(("publish_batch", {"orders": [given for _, given in orders]}))
    return list(tasks)


def test_high_job_starts_before_a_thousand_low_jobs(rpa_cluster, report_line):
    market = rpa_cluster.market(SHOPS + 1, act={"idempotent": True})
    urgent = market.shops[-1]  # without a low job, whose run it would wait for
    assert len(set(publish_low_jobs(market))) == LOW
    with rpa_cluster.node("steady", slots=SLOTS, times=PATIENT):
        rpa_cluster.wait(lambda: len(market.log.effects()) >= 10, "low ones run")
        before = market.publish(urgent, "act", dedupe_key="before", priority=0)
        rpa_cluster.await_state(before, "succeeded")  # from here on it is the shop that was served last
        high = market.publish(urgent, "act", dedupe_key="high", priority=0)
        # Its row names the start of the transaction: the nodes see it after the commit.
        published_at = rpa_cluster.sql("SELECT clock_timestamp() AS at")[0]["at"]
        rpa_cluster.await_state(high, "succeeded")
    ((count,),) = (row.values() for row in rpa_cluster.sql(_BETWEEN, [high, published_at]))
    report_line(f"{LOW - len(market.log.effects()) + 1} low jobs wait · a high one started after {count} of them")
    assert count <= SLOTS  # who had picked in the moment of its publication
    assert not find_overlaps(market.log.effects())


def test_low_jobs_start_under_high_load(rpa_cluster, report_line):
    """Urgent ones keep the only slot busy for longer than a low one needs to become urgent by waiting."""
    market = rpa_cluster.market(5, act={"idempotent": True})
    *busy, quiet = market.shops
    go = market.folder / "go"
    orders = [
        market.order(busy[number % 4], "act", dedupe_key=f"high-{number}", priority=0, payload={"hold": 0.15})
        for number in range(HIGH)
    ]
    orders += [market.order(quiet, "act", dedupe_key=f"low-{number}", priority=2) for number in range(2)]
    ageing = {"AFTERTOUCH_RPA_AGEING": f"PT{AGEING}S"}
    with rpa_cluster.node("ageing", slots=1, env=ageing, times=PATIENT):
        # Until all are published a job holds the slot: the node would start any that is alone.
        first = market.publish(busy[0], "act", dedupe_key="first", priority=0, payload={"until": str(go)})
        rpa_cluster.await_effects(market.log, [first])
        tasks = [first, *(str(answer["task"]) for answer in rpa_cluster.publisher.ask(*orders))]
        go.touch()
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
WHERE job.priority = 2 AND run.started_at > %s AND run.started_at < its.started_at
"""
