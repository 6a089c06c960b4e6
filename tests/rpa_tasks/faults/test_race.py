"""Many publish, many run: of a shop one at a time, everything comes to its end, nothing twice."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.house import seed_of_this_run
from tests.rpa_tasks.faults.effects import Effect, at_once, most_at_once
from tests.rpa_tasks.faults.yard import Market, Yard, desk

pytestmark = pytest.mark.faults

DESKS, SHOPS, SLOTS, EACH = 8, 50, 4, 60
WITHIN = 360.0


def orders(market: Market, chance: random.Random, desk: int) -> list[tuple[str, dict[str, Any]]]:
    def one(number: int) -> tuple[str, dict[str, Any]]:
        return market.order(
            chance.choice(market.shops),
            chance.choice(("sync", "reply")),
            dedupe_key=chance.choice(("", "today", f"{desk}-{number}")),
            priority=chance.choice((0, 1, 1, 2)),
            delay=chance.choice((0, 0, 0, 0.5, 1.5)),
            payload={
                "hold": round(chance.random() * 0.3, 3),
                "fail_once": chance.random() < 0.1,
                "sequel": f"{desk}-{number}",
            },
        )

    return [one(number) for number in range(EACH)]


def test_eight_publish_and_eight_run_for_fifty_shops(the_yard: Yard, told: Callable[[str], None]) -> None:
    seed = seed_of_this_run()
    chance = random.Random(seed)
    market = the_yard.market(SHOPS, sync={"idempotent": True}, reply={"exit_codes": {"transient": [70]}})
    with (
        the_yard.node("east", slots=SLOTS, ready=False) as east,
        the_yard.node("west", slots=SLOTS, ready=False) as west,
        desk(the_yard.environment) as ours,
    ):
        east.program.await_ready()
        west.program.await_ready()
        began_at = time.monotonic()
        (answers,) = ours.ask(("race", {"orders": [orders(market, chance, number) for number in range(DESKS)]}))
        receipts = [receipt for each in answers for receipt in each]
        published_in = time.monotonic() - began_at
        tasks = sorted({receipt["task"] for receipt in receipts})
        the_yard.wait(lambda: not the_yard.unsettled(tasks), f"all jobs end (seed {seed})", WITHIN, 0.2)
        took = time.monotonic() - began_at

    effects = market.log.effects()
    rows = {str(row["task_id"]): row for row in the_yard.sql(_JOBS, [tasks])}
    nodes = Counter(row["node"] for row in rows.values())
    told(
        f"8 desks × 8 processes × 50 shops · seed {seed} · {len(receipts)} publications in {published_in:.1f} s, "
        f"{len(tasks)} jobs, {len(effects)} runs in {took:.1f} s, at most {most_at_once(effects)} at once, "
        f"{dict(nodes)} · never two of a shop"
    )
    assert len(receipts) == DESKS * EACH
    assert not market.log.twice
    assert not at_once(effects), seed
    assert not lost(receipts, effects, rows), seed
    assert {row["state"] for row in rows.values()} == {"succeeded"}
    assert not the_yard.sql("SELECT FROM rpa_tasks_lane WHERE task_id IS NOT NULL")
    assert all(nodes[name] > len(tasks) / 10 for name in ("east", "west"))
    assert most_at_once(effects) > SLOTS  # else nobody raced


@pytest.mark.parametrize(
    ("began", "lease", "met", "problem"),
    [(1.5, 2, [], "two at once"), (2.5, 1, [], "do not grow"), (2.5, 2, [7], "met processes"), (2.5, 2, [], "")],
)
def test_the_log_would_show_it(began: float, lease: int, met: list[int], problem: str) -> None:
    first = Effect("s1", "a", "a", 1, 10, 1.0, [], ended=2.0)
    second = Effect("s1", "b", "b", lease, 11, began, met, ended=3.0)
    found = at_once([second, first])
    assert [problem in each for each in found] == ([True] if problem else [])


def lost(receipts: list[dict[str, Any]], effects: list[Effect], rows: dict[str, dict[str, Any]]) -> list[str]:
    """Requests without an effect after them, and effects that no run tells of."""
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
