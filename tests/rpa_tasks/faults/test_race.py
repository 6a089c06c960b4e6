"""Many publish, many run: of a shop one at a time, everything comes to its end, nothing twice."""

import random
import time
from collections import Counter, defaultdict

from tests.rpa_tasks.faults.effect_log import find_overlaps, max_concurrency
from tests.rpa_tasks.faults.rpa_cluster import PATIENT, run_publisher
from tests.support.stack import read_seed
from tests.support.waiting import WAIT_LIMIT

DESKS, SHOPS, SLOTS, EACH = 8, 50, 4, 30


def orders(market, chance, publisher):
    def one(number):
        return market.order(
            chance.choice(market.shops),
            chance.choice(("sync", "reply")),
            dedupe_key=chance.choice(("", "today", f"{publisher}-{number}")),
            priority=chance.choice((0, 1, 1, 2)),
            delay=chance.choice((0, 0, 0, 0.5, 1.5)),
            payload={
                "hold": round(chance.random() * 0.3, 3),
                "fail_once": chance.random() < 0.1,
                "sequel": f"{publisher}-{number}",
            },
        )

    return [one(number) for number in range(EACH)]


def test_concurrent_publishers_and_nodes_run_each_job_once(rpa_cluster, report_line):
    seed = read_seed()
    chance = random.Random(seed)
    market = rpa_cluster.market(SHOPS, sync={"idempotent": True}, reply={"exit_codes": {"transient": [70]}})
    go = market.folder / "go"
    with (
        rpa_cluster.node("east", slots=SLOTS, times=PATIENT, ready=False) as east,
        rpa_cluster.node("west", slots=SLOTS, times=PATIENT, ready=False) as west,
        run_publisher(rpa_cluster.environment) as ours,
    ):
        east.program.await_ready()
        west.program.await_ready()
        # At first every slot of both nodes is taken at the same time, however slow the machine is.
        held = rpa_cluster.publisher.ask(
            *(market.order(shop, "sync", dedupe_key="held", payload={"until": str(go)})
              for shop in market.shops[: 2 * SLOTS])
        )  # fmt: skip
        rpa_cluster.await_effects(market.log, [receipt["task"] for receipt in held])
        go.touch()
        began_at = time.monotonic()
        (answers,) = ours.ask(("race", {"orders": [orders(market, chance, number) for number in range(DESKS)]}))
        receipts = [*held, *(receipt for each in answers for receipt in each)]
        published_in = time.monotonic() - began_at
        tasks = sorted({receipt["task"] for receipt in receipts})
        rpa_cluster.wait(lambda: not rpa_cluster.unsettled(tasks), f"all jobs end (seed {seed})", 1.5 * WAIT_LIMIT, 0.2)
        took = time.monotonic() - began_at

    effects = market.log.effects()
    rows = {str(row["task_id"]): row for row in rpa_cluster.sql(_JOBS, [tasks])}
    nodes = Counter(row["node"] for row in rows.values())
    report_line(
        f"8 desks × 8 processes × 50 shops · seed {seed} · {len(receipts)} publications in {published_in:.1f} s, "
        f"{len(tasks)} jobs, {len(effects)} runs in {took:.1f} s, at most {max_concurrency(effects)} at once, "
        f"{dict(nodes)} · never two of a shop"
    )
    assert len(receipts) == len(held) + DESKS * EACH
    assert not market.log.twice
    assert not find_overlaps(effects), seed
    assert not find_lost_jobs(receipts, effects, rows), seed
    assert {row["state"] for row in rows.values()} == {"succeeded"}
    assert not rpa_cluster.sql("SELECT FROM rpa_tasks_lane WHERE task_id IS NOT NULL")
    assert min(nodes["east"], nodes["west"]) >= SLOTS
    assert max_concurrency(effects) == 2 * SLOTS  # otherwise there was no race


def find_lost_jobs(receipts, effects, rows):
    """Return requests without an effect after them, and effects without a run."""
    found = []
    asked = Counter(receipt["task"] for receipt in receipts)
    by_task = defaultdict(list)
    for effect in effects:
        by_task[effect.task].append(effect)
    for receipt in receipts:
        mine = by_task[receipt["task"]]
        if not mine or mine[-1].began < receipt["asked_at"]:
            found.append(f"accepted and lost: {receipt} {mine}")
    for task, mine in by_task.items():
        row = rows.get(task)
        if row is None or row["runs"] != len(mine) or row["requests"] != asked[task]:
            found.append(f"{len(mine)} effects, {asked[task]} requests: {row}")
    return found


_JOBS = """
SELECT job.task_id, job.state, job.node, job.attempt, job.requests,
       (SELECT count(*) FROM rpa_tasks_run AS run WHERE run.job_id = job.task_id) AS runs
FROM rpa_tasks_job AS job WHERE job.task_id = ANY(%s::uuid[])
"""
