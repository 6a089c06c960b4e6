"""What the back office and the API read of jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils.timezone import now

from rpa_tasks.jobs import dispatch, queries, schedules
from rpa_tasks.jobs.publish import PublishRequest, publish_job
from rpa_tasks.jobs.publish_many import publish_many
from rpa_tasks.models import Flow, Job, Platform, Shop
from scheduling import sql
from scheduling.models.touch import RARE
from tests.rpa_tasks.core.conftest import Market

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_tables")]


@pytest.mark.parametrize("state", RARE)
def test_jobs_page_of_rare_state_uses_index(market: Market, state: str) -> None:
    market.shop()
    market.flow()
    market.publish()
    sql.execute(_MANY, {"count": 4_000, "state": state})
    asked: list[tuple[str, Any]] = []

    def note(execute: Any, statement: str, parameters: Any, many: bool, context: Any) -> Any:
        asked.append((statement, parameters))
        return execute(statement, parameters, many, context)

    with connection.cursor() as cursor:
        # Earlier tests leave statistics of the joined tables, too.
        cursor.execute("ANALYZE rpa_tasks_job, rpa_tasks_shop, rpa_tasks_flow, rpa_tasks_platform")
        with connection.execute_wrapper(note):
            found = [each.pk for each in queries.jobs_page(state=state)]
        cursor.execute(f"EXPLAIN {asked[0][0]}", asked[0][1])
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert found == sorted(Job.objects.filter(state=state).values_list("pk", flat=True), reverse=True)
    assert len(found) == 5
    assert "Index Scan Backward using rpa_job_rare on" in plan, plan


WANTED = PublishRequest(platform="pdd", shop_id="s1", task_type="sync_order")
ORDER = {"platform": "pdd", "task_type": "sync_order"}


@pytest.mark.parametrize(
    "act",
    [
        lambda: publish_job(WANTED),
        lambda: publish_many([WANTED, WANTED]),
        lambda: schedules.publish_round(1, sql.now(), [], ORDER),
        lambda: Flow.objects.update(retired_at=now()) and dispatch.cancel_retired_jobs(),
        lambda: Shop.objects.update(retired_at=now()) and dispatch.cancel_retired_jobs(),
        lambda: Platform.objects.update(retired_at=now()) and dispatch.cancel_retired_jobs(),
    ],
    ids=["publish", "publish many", "schedule", "retired flow", "retired shop", "retired platform"],
)
def test_statements_about_waiting_jobs_read_no_history(
    market: Market, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]
) -> None:
    market.shop()
    market.flow()
    market.publish(delay=timedelta(hours=1))
    sql.execute(_MANY, {"count": 4_000, "state": "succeeded"})
    sql.execute("ANALYZE rpa_tasks_job, rpa_tasks_shop, rpa_tasks_flow, rpa_tasks_platform", {})
    asked: list[tuple[str, Any]] = []
    run = sql.rows

    def note(statement: str, parameters: Any, **options: Any) -> Any:
        asked.append((statement, parameters))
        return run(statement, parameters, **options)

    def note_query(execute: Any, statement: str, parameters: Any, many: bool, context: Any) -> Any:
        asked.append((statement, parameters))
        return execute(statement, parameters, many, context)

    monkeypatch.setattr(sql, "rows", note)
    with connection.execute_wrapper(note_query):
        assert act()
    reads = 0
    for statement, parameters in asked:
        if "rpa_tasks_job" not in statement or not statement.lstrip().startswith(("SELECT", "WITH")):
            continue
        for node in explain(statement, parameters):
            reads += 1
            assert node["Node Type"] != "Seq Scan", statement
            assert node.get("Rows Removed by Filter", 0) < 100, statement
    assert reads


def explain(statement: str, parameters: Any) -> Iterator[dict[str, Any]]:
    """Run the statement and take it back. Yield the nodes of its plan that have read jobs."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.replace(')b', ')s')}", parameters)
        found = cursor.fetchone()[0]
        transaction.set_rollback(True)
    plan = json.loads(found) if isinstance(found, str) else found
    left = [plan[0]["Plan"]]
    while left:
        node = left.pop()
        left += node.get("Plans", [])
        is_scan = node.get("Relation Name") == "rpa_tasks_job" and "Scan" in node["Node Type"]
        if is_scan and node["Actual Loops"]:
            yield node


_MANY = """
INSERT INTO rpa_tasks_job (task_id, root_id, state, priority, due_at, planned_at, paused_by, attempt, lease_no, wakeups,
    reason, created_at, shop_id, flow_id, payload, dedupe_key, fresh, requests, failures, source, node,
    progress_message, settled_at)
SELECT id, id, CASE WHEN n %% 800 = 0 THEN %(state)s ELSE 'succeeded' END, 1, now(), now(), '', 1, 1, 0, '', now(),
    shop_id, flow_id, '{}', '', false, 1, 0, '', '', '', now()
FROM (SELECT shop_id, flow_id FROM rpa_tasks_job LIMIT 1) AS model,
    (SELECT gen_random_uuid() AS id, n FROM generate_series(1, %(count)s) AS n) AS made
"""
