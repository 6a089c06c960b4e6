"""The check of a login that an operator reports: who may start, and what its end means for the shop."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils.timezone import now

from rpa_tasks.jobs import dispatch
from rpa_tasks.jobs.dispatch import RunResult, settle_run
from rpa_tasks.jobs.ledger import LANES, Pick, jobs
from rpa_tasks.jobs.publish import request_cancel
from rpa_tasks.jobs.queries import shop_states
from rpa_tasks.jobs.shops import check_login, clear_ended_checks
from rpa_tasks.models import ExecutionNode, Flow, Job, Lane, LoginState, Shop, TakeOverEnd
from rpa_tasks.outcomes import RunOutcome, Verdict
from rpa_tasks.takeover import leases
from scheduling import sql
from scheduling.errors import NotFound
from scheduling.models import FailedTask
from tests.rpa_tasks.core.conftest import Market
from tests.support.second_connection import Race

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def shop(market: Market, transactional_db: None) -> Shop:
    """A logged-out shop whose run waits, on a platform with a check flow."""
    market.platform(check_task_type="check_login")
    market.flow()
    market.flow("check_login", idempotent=False)
    shop = market.shop()
    market.publish()
    lose_login(shop)
    return shop


def lose_login(shop: Shop) -> None:
    Shop.objects.filter(pk=shop.pk).update(login_state=LoginState.NEEDED, login_lost_at=now())


def end_check(pick: Pick, outcome: str, reason: str = "") -> Job:
    job = Job.objects.select_related("shop__platform", "flow").get(pk=pick.claim.task_id)
    ended = RunResult(Verdict(RunOutcome(outcome), reason), started_at=sql.now())
    assert settle_run(job, pick.claim, ended)
    return Job.objects.get(pk=job.pk)


def state_of(shop: Shop) -> tuple[str, Any, str]:
    lane = Lane.objects.select_related("shop").get(shop=shop)
    return lane.shop.login_state, lane.check_id, lane.check_reason


def is_shown_as_checking(shop: Shop) -> bool:
    (state,) = shop_states(Shop.objects.filter(pk=shop.pk))
    return state.checking


def test_only_the_check_starts_and_its_success_lets_the_waiting_run_go_on(
    market: Market, shop: Shop, sent_wakeups: list[Any]
) -> None:
    assert market.pick() is None
    waiting = Job.objects.get()
    sent_wakeups.clear()
    assert check_login(shop.pk, by="ann")
    check = Job.objects.get(flow__task_type="check_login")
    assert [each.task_id for each in sent_wakeups] == [check.pk]
    assert (check.priority, check.source, check.payload) == (0, "login check by ann", {})
    assert is_shown_as_checking(shop)
    pick = market.pick()
    assert pick.claim.task_id == check.pk
    sent_wakeups.clear()
    assert end_check(pick, "succeeded").state == "succeeded"
    assert state_of(shop) == ("ok", None, "")
    assert [each.task_id for each in sent_wakeups] == [waiting.pk]
    assert market.pick().claim.task_id == waiting.pk


@pytest.mark.usefixtures("fresh_tables")
@pytest.mark.parametrize("login", ["ok", "checked"])
def test_pick_reads_at_most_one_job_of_each_tier(market: Market, shop: Shop, login: str) -> None:
    """Each pick of any node read the whole backlog of a logged-out shop, in search of the check."""
    sql.execute(_BACKLOG, {"count": 200})
    if login == "ok":
        Shop.objects.update(login_state=LoginState.OK)
    else:
        assert check_login(shop.pk, by="ann")
    sql.execute("ANALYZE rpa_tasks_job", {})  # earlier tests may have left the statistics of an almost empty table

    given = {"queues": None, "node": "n1", "ageing": 600.0, "home_lease": timedelta(minutes=2)}
    (((plan,),),) = sql.rows(f"EXPLAIN (ANALYZE, FORMAT JSON) {LANES}", given)

    assert 1 <= count_job_rows(plan["Plan"]) <= 3
    pick = market.pick()
    assert Job.objects.get(pk=pick.claim.task_id).flow.task_type == ("sync_order" if login == "ok" else "check_login")


def count_job_rows(plan: dict[str, Any]) -> int:
    """The rows of jobs that a plan reads, with those that its filters drop."""
    own = (
        plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
        if plan.get("Relation Name") == Job._meta.db_table
        else 0
    )
    return int(own * plan["Actual Loops"]) + sum(map(count_job_rows, plan.get("Plans", ())))


_BACKLOG = """
INSERT INTO rpa_tasks_job (task_id, root_id, state, priority, due_at, planned_at, paused_by, attempt, lease_no, wakeups,
    reason, created_at, shop_id, flow_id, payload, dedupe_key, fresh, requests, failures, source, node,
    progress_message)
SELECT id, id, 'scheduled', n %% 3, now() - n * interval '1 second', now(), '', 0, 0, 0, '', now(), shop_id, flow_id,
    '{}', id::text, true, 1, 0, '', '', ''
FROM (SELECT shop_id, flow_id FROM rpa_tasks_job LIMIT 1) AS model,
    (SELECT gen_random_uuid() AS id, n FROM generate_series(1, %(count)s) AS n) AS made
"""


@pytest.mark.parametrize(
    ("outcome", "reason", "shown"),
    [
        ("session", "exit_77", "login_needed"),
        ("business", "exit_65", "exit_65"),
        ("cancelled", "cancelled", "cancelled"),
        ("unknown", "timeout", "timeout"),
    ],
)
def test_check_without_success_leaves_the_login_needed_and_no_failed_task(
    market: Market, shop: Shop, outcome: str, reason: str, shown: str
) -> None:
    check_login(shop.pk, by="ann")
    ended = end_check(market.pick(), outcome, reason)
    assert (ended.state, ended.reason) == ("cancelled", shown)
    assert state_of(shop) == ("needed", None, shown)
    assert not is_shown_as_checking(shop)
    assert not FailedTask.objects.exists()
    assert market.pick() is None
    assert check_login(shop.pk, by="ann")
    assert state_of(shop)[2] == ""


def test_check_that_is_tried_again_stays_open_until_its_last_attempt(market: Market, shop: Shop) -> None:
    Flow.objects.filter(task_type="check_login").update(retry_delays=[30])
    check_login(shop.pk, by="ann")
    check = end_check(market.pick(), "transient", "exit_1")
    assert (check.state, is_shown_as_checking(shop)) == ("scheduled", True)
    assert not check_login(shop.pk, by="ben")
    assert market.pick() is None
    Job.objects.filter(pk=check.pk).update(due_at=now() - timedelta(seconds=1))
    assert end_check(market.pick(), "transient", "exit_1").state == "cancelled"
    assert state_of(shop) == ("needed", None, "exit_1")


def test_concurrent_continues_start_one_check(shop: Shop, race: Race) -> None:
    found = race(6, lambda number: check_login(shop.pk, by=f"u{number}"))
    assert sorted(found) == [False] * 5 + [True]
    assert Job.objects.filter(flow__task_type="check_login").count() == 1


def test_continue_races_with_the_end_of_a_check_and_with_the_sweep(market: Market, shop: Shop, race: Race) -> None:
    """A check that has just started is never forgotten because the one before it has ended."""
    check_login(shop.pk, by="ann")
    for _ in range(8):
        pick = market.pick()
        assert pick is not None
        acts = [
            lambda pick=pick: end_check(pick, "session", "exit_77"),
            lambda: check_login(shop.pk, by="ben"),
            clear_ended_checks,
        ]
        race(3, lambda number, acts=acts: acts[number]())
        check_login(shop.pk, by="cid")
        assert is_shown_as_checking(shop)


def test_cancelled_waiting_check_is_forgotten(market: Market, shop: Shop) -> None:
    check_login(shop.pk, by="ann")
    check = Job.objects.get(flow__task_type="check_login")
    assert clear_ended_checks() == 0
    assert request_cancel(check.pk, by="ann") == "cancelled"
    assert not is_shown_as_checking(shop)
    assert market.pick() is None
    dispatch.run_repair_passes()
    assert state_of(shop) == ("needed", None, "cancelled")
    assert check_login(shop.pk, by="ann")


@pytest.mark.parametrize("began", [False, True], ids=["before its command", "in its command"])
def test_worker_lost_in_a_check_leaves_the_login_needed_or_repeats_it(market: Market, shop: Shop, began: bool) -> None:
    check_login(shop.pk, by="ann")
    pick = market.pick()
    if began:
        assert jobs.mark_sending([pick.claim])
    Job.objects.filter(pk=pick.claim.task_id).update(lease_until=now() - timedelta(seconds=1))
    assert dispatch.rescue_expired_runs() == 1
    assert not FailedTask.objects.exists()
    if began:  # the flow is not idempotent
        assert state_of(shop) == ("needed", None, "worker_lost")
        assert market.pick() is None
    else:
        assert is_shown_as_checking(shop)
        assert market.pick().claim.task_id == pick.claim.task_id


def test_check_starts_when_the_take_over_has_ended(market: Market, shop: Shop) -> None:
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=now(), slots=3)
    row = leases.start_take_over(shop.pk, user=User.objects.create(username="ann"), address="")
    leases.request_end(row, TakeOverEnd.CONTINUED)
    assert check_login(shop.pk, by="ann")
    assert market.pick() is None
    assert leases.end_take_over(row, TakeOverEnd.CONTINUED)
    assert market.pick() is not None


def test_report_counts_without_a_check_flow(market: Market, shop: Shop) -> None:
    Flow.objects.filter(task_type="check_login").update(retired_at=now())
    assert check_login(shop.pk, by="ann")
    assert state_of(shop) == ("ok", None, "")
    assert not check_login(shop.pk, by="ann")
    assert market.pick() is not None


def test_check_needs_a_logged_out_shop(shop: Shop) -> None:
    Shop.objects.update(login_state=LoginState.OK)
    assert not check_login(shop.pk, by="ann")
    Shop.objects.update(retired_at=now())
    with pytest.raises(NotFound):
        check_login(shop.pk, by="ann")
