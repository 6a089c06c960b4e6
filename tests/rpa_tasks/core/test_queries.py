"""What the back office and the API read of jobs."""

import json
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils.timezone import now

from rpa_tasks import metrics
from rpa_tasks.api.jobs import select_jobs
from rpa_tasks.jobs import dispatch, schedules
from rpa_tasks.jobs.ledger import HEADS
from rpa_tasks.jobs.publish import PublishRequest, publish_job, publish_many
from rpa_tasks.jobs.queries import filter_jobs
from rpa_tasks.jobs.shops import check_login
from rpa_tasks.models import Flow, Job, Lane, Platform, Shop
from scheduling import sql
from scheduling.models.touch import RARE
from tests.support.tables import each_row

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_tables")]


@pytest.fixture
def jobs_with_history(market):
    """A job that waits, 4,000 that have succeeded, and five of each rare state."""
    market.shop()
    market.flow()
    market.publish(delay=timedelta(hours=1))
    sql.execute(_MANY, {"rare": list(RARE)})
    # Earlier tests leave statistics of the joined tables, too.
    sql.execute("ANALYZE rpa_tasks_job, rpa_tasks_shop, rpa_tasks_flow, rpa_tasks_platform", {})


@each_row("state", RARE)
def test_jobs_page_of_rare_state_uses_index(jobs_with_history, state):
    page = select_jobs().filter(filter_jobs(state=state)).order_by("-pk")[:50]
    plan = page.explain()
    found = [each.pk for each in page]
    assert found == sorted(Job.objects.filter(state=state).values_list("pk", flat=True), reverse=True)
    assert len(found) == 5
    assert "Index Scan Backward using rpa_job_rare on" in plan, plan


WANTED = PublishRequest(platform="pdd", shop_id="s1", task_type="sync_order")
ORDER = {"platform": "pdd", "task_type": "sync_order"}


def retire(model):
    model.objects.update(retired_at=now())
    dispatch.cancel_retired_jobs()
    return Job.objects.filter(state="cancelled", reason="retired").count() == 1


@each_row(
    "act",
    [
        lambda: publish_job(WANTED),
        lambda: publish_many([WANTED, WANTED]),
        lambda: schedules.publish_round(1, sql.now(), [], ORDER),
        lambda: retire(Flow),
        lambda: retire(Shop),
        lambda: retire(Platform),
        lambda: metrics.read_gauge(metrics.WAITING),
    ],
)
def test_statements_about_waiting_jobs_read_no_history(jobs_with_history, monkeypatch, act):
    asked = []
    run = sql.rows

    def note(statement, parameters, **options):
        asked.append((statement, parameters))
        return run(statement, parameters, **options)

    def note_query(execute, statement, parameters, many, context):
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


@each_row("login", ["ok", "checked"])
def test_pick_reads_at_most_one_job_of_each_tier(jobs_with_history, market, login):
    """Each pick of any node read the whole backlog of a logged-out shop, in search of the check."""
    market.flow("check_login")
    Platform.objects.update(check_task_type="check_login")
    Job.objects.filter(state="succeeded", pk__in=Job.objects.filter(state="succeeded")[:200]).update(state="scheduled")
    if login == "checked":
        Shop.objects.update(login_state="needed")
        assert check_login(Shop.objects.get().pk, by="ann")
    sql.execute("ANALYZE rpa_tasks_job", {})

    given = {"queues": None, "node": "n1", "ageing": 600.0, "home_lease": timedelta(minutes=2), "ahead": timedelta(0)}
    read = [
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in explain(HEADS, given)
    ]

    assert 0 < sum(read) < 4, "about three, of which PostgreSQL shows the rounded average"
    pick = market.pick()
    assert Job.objects.get(pk=pick.claim.task_id).flow.task_type == ("sync_order" if login == "ok" else "check_login")


def test_pick_reads_no_job_of_a_shop_that_another_node_serves(jobs_with_history, market):
    """Every pick of any other node read the whole backlog of such a shop, in search of a job without a browser."""
    Flow.objects.update(needs_browser=True)
    Job.objects.filter(state="succeeded", pk__in=Job.objects.filter(state="succeeded")[:200]).update(state="scheduled")
    market.node("n1")
    Lane.objects.update(home="n1")
    given = {"queues": None, "node": "n2", "ageing": 600.0, "home_lease": timedelta(minutes=2), "ahead": timedelta(0)}

    assert not list(explain(HEADS, given))
    Flow.objects.update(needs_browser=False)
    assert list(explain(HEADS, given))


def explain(statement, parameters):
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
INSERT INTO rpa_tasks_job (task_id, root_id, state, priority, due_at, planned_at, attempt, lease_no, reason,
    created_at, shop_id, flow_id, payload, dedupe_key, fresh, requests, failures, source, node,
    progress_message, settled_at)
SELECT id, id, COALESCE((%(rare)s::text[])[1 + n / 5], 'succeeded'), 1, now(), now(), 1, 1, '', now(),
    shop_id, flow_id, '{}', '', false, 1, 0, '', '', '', now()
FROM (SELECT shop_id, flow_id FROM rpa_tasks_job LIMIT 1) AS model,
    (SELECT gen_random_uuid() AS id, n FROM generate_series(0, 4000) AS n) AS made
"""
