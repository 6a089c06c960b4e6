"""What the back office and the API read of jobs."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from rpa_tasks.jobs import queries
from rpa_tasks.models import Job
from scheduling import sql
from scheduling.models.ledger import RARE

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("state", RARE)
def test_jobs_page_of_rare_state_uses_index(market: Any, state: str) -> None:
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


_MANY = """
INSERT INTO rpa_tasks_job (task_id, root_id, state, priority, due_at, planned_at, parked, attempt, lease_no, hints,
    reason, created_at, shop_id, flow_id, payload, dedupe_key, fresh, requests, failures, source, node,
    progress_message, settled_at)
SELECT id, id, CASE WHEN n %% 800 = 0 THEN %(state)s ELSE 'succeeded' END, 1, now(), now(), '', 1, 1, 0, '', now(),
    shop_id, flow_id, '{}', '', false, 1, 0, '', '', '', now()
FROM (SELECT shop_id, flow_id FROM rpa_tasks_job LIMIT 1) AS model,
    (SELECT gen_random_uuid() AS id, n FROM generate_series(1, %(count)s) AS n) AS made
"""
