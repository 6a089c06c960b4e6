"""The check of a login that an operator reports: who may start, and what its end means for the shop."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest
from django.contrib.auth.models import User
from django.utils.timezone import now

from rpa_tasks.api.shops import ShopOut, select_shops
from rpa_tasks.jobs import dispatch
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.publish import request_cancel
from rpa_tasks.jobs.shops import check_login, clear_ended_checks
from rpa_tasks.models import Flow, Job, Lane, LoginState, Shop, TakeOverEnd
from rpa_tasks.takeover import leases
from scheduling.errors import NotFound
from scheduling.ids import new_id
from scheduling.models import WAITING, FailedTask
from tests.rpa_tasks.core.conftest import Market
from tests.scheduling.api.serving import database_url
from tests.support.second_connection import act_and_close
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db


@pytest.fixture
def shop(market):
    """A logged-out shop whose run waits, on a platform with a check flow."""
    market.platform(check_task_type="check_login")
    market.flow()
    market.flow("check_login", idempotent=False)
    shop = market.shop()
    market.publish()
    lose_login(shop)
    return shop


def lose_login(shop):
    Shop.objects.filter(pk=shop.pk).update(login_state=LoginState.NEEDED, login_lost_at=now())


def end_check(pick, outcome, reason=""):
    assert Market().settle(pick, outcome, reason)
    return Job.objects.get(pk=pick.claim.task_id)


def state_of(shop):
    lane = Lane.objects.select_related("shop").get(shop=shop)
    return lane.shop.login_state, lane.check_id, lane.check_reason


def is_shown_as_checking(shop):
    return ShopOut.resolve_login(select_shops().get(pk=shop.pk)) == "checking"


@pytest.mark.django_db(transaction=True)
def test_only_the_check_starts_and_its_success_lets_the_waiting_run_go_on(market, shop, sent_wakeups):
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


@each_row(
    "outcome, reason, shown",
    [
        ("session", "exit_77", "login_needed"),
        ("business", "exit_65", "exit_65"),
        ("cancelled", "cancelled", "cancelled"),
        ("unknown", "timeout", "timeout"),
    ],
)
def test_check_without_success_leaves_the_login_needed_and_no_failed_task(market, shop, outcome, reason, shown):
    check_login(shop.pk, by="ann")
    ended = end_check(market.pick(), outcome, reason)
    assert (ended.state, ended.reason) == ("cancelled", shown)
    assert state_of(shop) == ("needed", None, shown)
    assert not is_shown_as_checking(shop)
    assert not FailedTask.objects.exists()
    assert market.pick() is None
    assert check_login(shop.pk, by="ann")
    assert state_of(shop)[2] == ""


def test_check_that_is_tried_again_stays_open_until_its_last_attempt(market, shop):
    Flow.objects.filter(task_type="check_login").update(retry_delays=[30])
    check_login(shop.pk, by="ann")
    check = end_check(market.pick(), "transient", "exit_1")
    assert (check.state, is_shown_as_checking(shop)) == ("scheduled", True)
    assert not check_login(shop.pk, by="ben")
    assert market.pick() is None
    Job.objects.filter(pk=check.pk).update(due_at=now() - timedelta(seconds=1))
    assert end_check(market.pick(), "transient", "exit_1").state == "cancelled"
    assert state_of(shop) == ("needed", None, "exit_1")


@pytest.mark.django_db(transaction=True)
def test_concurrent_continues_start_one_check(shop, race):
    found = race(6, lambda number: check_login(shop.pk, by=f"u{number}"))
    assert sorted(found) == [False] * 5 + [True]
    assert Job.objects.filter(flow__task_type="check_login").count() == 1


@pytest.mark.django_db(transaction=True)
def test_continue_races_with_the_end_of_a_check_and_with_the_sweep(market, shop, race):
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


@pytest.mark.django_db(transaction=True)
def test_rows_that_another_transaction_holds_stop_no_repair_pass(market, shop):
    """The pass waited for them without end, and so did the wake-ups after it."""
    other, held = market.shop("s2"), market.shop("s3")
    for each in (shop, other, held):
        market.publish(each.shop_id)
        Lane.objects.filter(shop=each).update(check_id=new_id())
    Flow.objects.update(retired_at=now())
    with psycopg.connect(database_url()) as holder:
        holder.execute("SELECT FROM rpa_tasks_job WHERE shop_id = %s FOR NO KEY UPDATE", [held.pk])
        holder.execute("SELECT FROM rpa_tasks_lane WHERE shop_id = %s FOR NO KEY UPDATE", [held.pk])
        with ThreadPoolExecutor(1) as pool:
            repair = pool.submit(act_and_close, dispatch.run_repair_passes)
            try:
                repair.result(20)
            finally:
                holder.rollback()
    assert list(Job.objects.filter(state__in=WAITING).values_list("shop", flat=True)) == [held.pk]
    assert list(Lane.objects.exclude(check_id=None).values_list("shop", flat=True)) == [held.pk]


def test_cancelled_waiting_check_is_forgotten(market, shop):
    check_login(shop.pk, by="ann")
    check = Job.objects.get(flow__task_type="check_login")
    assert clear_ended_checks() == 0
    assert request_cancel(check.pk, by="ann") == "cancelled"
    assert not is_shown_as_checking(shop)
    assert market.pick() is None
    dispatch.run_repair_passes()
    assert state_of(shop) == ("needed", None, "cancelled")
    assert check_login(shop.pk, by="ann")


@each_row("began", [False, True])
def test_worker_lost_in_a_check_leaves_the_login_needed_or_repeats_it(market, shop, began):
    check_login(shop.pk, by="ann")
    pick = market.pick()
    if began:
        assert job_ledger.mark_sending(pick.claim)
    Job.objects.filter(pk=pick.claim.task_id).update(lease_until=now() - timedelta(seconds=1))
    assert dispatch.rescue_expired_runs() == 1
    assert not FailedTask.objects.exists()
    if began:  # the flow is not idempotent
        assert state_of(shop) == ("needed", None, "worker_lost")
        assert market.pick() is None
    else:
        assert is_shown_as_checking(shop)
        assert market.pick().claim.task_id == pick.claim.task_id


def test_check_starts_when_the_take_over_has_ended(market, shop):
    market.node()
    row = leases.start_take_over(shop.pk, user=User.objects.create(username="ann"), address="")
    leases.request_end(row, TakeOverEnd.CONTINUED)
    assert check_login(shop.pk, by="ann")
    assert market.pick() is None
    assert leases.end_take_over(row, TakeOverEnd.CONTINUED)
    assert market.pick() is not None


def test_report_counts_without_a_check_flow(market, shop):
    Flow.objects.filter(task_type="check_login").update(retired_at=now())
    assert check_login(shop.pk, by="ann")
    assert state_of(shop) == ("ok", None, "")
    assert not check_login(shop.pk, by="ann")
    assert market.pick() is not None


def test_edit_of_a_shop_keeps_the_login_that_a_run_has_lost_in_between(market):
    shop = market.shop()
    lose_login(shop)
    shop.name = "renamed"
    shop.save()

    shop.refresh_from_db()
    assert (shop.name, shop.login_state) == ("renamed", LoginState.NEEDED)


def test_check_needs_a_logged_out_shop(shop):
    Shop.objects.update(login_state=LoginState.OK)
    assert not check_login(shop.pk, by="ann")
    Shop.objects.update(retired_at=now())
    with pytest.raises(NotFound):
        check_login(shop.pk, by="ann")
