"""The same shop, flow and key run once in a window, whatever races for it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction
from django.utils.timezone import now

from rpa_tasks.jobs import payloads, schedules
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.payloads import add_period
from rpa_tasks.jobs.publish import BacklogFull, PublishRequest, publish_job, publish_many, request_cancel
from rpa_tasks.jobs.queries import repeat_request
from rpa_tasks.jobs.retention import WINDOWS
from rpa_tasks.jobs.schedules import RoundCounts
from rpa_tasks.models import DedupeWindow, Flow, Job, Shop
from rpa_tasks.outcomes import RunOutcome
from scheduling import sql
from scheduling.errors import Conflict, InvalidInput
from scheduling.ids import new_id
from scheduling.models import FailedTask
from scheduling.operations.failed_tasks import Actor, retry_failed_task
from scheduling.operations.retention import delete_expired_in_table
from tests.support.tables import each_row

DAY = timedelta(days=1)
ORDER = {"platform": "pdd", "task_type": "sync_order"}


@pytest.fixture(autouse=True)
def shop(market):
    market.flow(dedupe_by="task_type", dedupe_window=DAY)
    market.shop()


def end_next_run(market, outcome=RunOutcome.SUCCEEDED):
    pick = market.pick()
    assert pick is not None
    job_ledger.mark_sending(pick.claim)
    assert market.settle(pick, outcome, "test")


def test_window_refuses_second_run_after_success_and_names_the_first(market):
    first = market.publish(payload={"page": 1})
    assert market.publish(payload={"page": 2}).because == "waiting"
    pick = market.pick()
    running = market.publish(payload={"page": 3})
    assert (running.task_id, running.duplicate, running.because) == (first.task_id, True, "running")
    assert pick is not None
    market.settle(pick)

    again = market.publish(payload={"page": 4})

    assert (again.task_id, again.duplicate, again.state, again.because) == (first.task_id, True, "succeeded", "window")
    assert again.window_ends_at
    assert timedelta(hours=23) < again.window_ends_at - now() <= DAY
    assert Job.objects.count() == 1


def test_window_covers_one_shop_flow_and_key(market):
    market.shop("s2")
    market.flow("reply", dedupe_by="payload", dedupe_window=DAY)
    for _ in range(2):
        receipts = [
            market.publish(), market.publish("s2"), market.publish(dedupe_key="2026-11-23"),
            market.publish(task_type="reply", payload={"to": 1}), market.publish(task_type="reply", payload={"to": 2}),
        ]  # fmt: skip
        while Job.objects.filter(state__in=("scheduled", "queued")).exists():
            end_next_run(market)
    assert all(receipt.because == "window" for receipt in receipts)
    assert Job.objects.count() == 5
    assert not market.publish(dedupe_key="").duplicate, "an empty key always starts a job"


@each_row(
    "rerun, outcome, runs_again",
    [
        ("refuse", RunOutcome.SUCCEEDED, False),
        ("refuse", RunOutcome.BUSINESS, False),
        ("after_failure", RunOutcome.SUCCEEDED, False),
        ("after_failure", RunOutcome.BUSINESS, True),
        ("after_failure", RunOutcome.UNKNOWN, False),  # a person decides
        ("after_failure", RunOutcome.CANCELLED, True),
        ("refuse", RunOutcome.CANCELLED, False),
        ("always", RunOutcome.SUCCEEDED, True),
        ("always", RunOutcome.UNKNOWN, True),
    ],
)
def test_rerun_decides_after_the_end_of_the_holder(market, rerun, outcome, runs_again):
    Flow.objects.update(dedupe_rerun=rerun)
    market.publish()
    end_next_run(market, outcome)

    assert market.publish().duplicate is not runs_again
    end_next_run(market) if runs_again else None
    assert Job.objects.count() == 1 + runs_again


def test_job_cancelled_before_its_first_run_holds_no_window(market):
    Flow.objects.update(dedupe_rerun="refuse")
    request_cancel(market.publish().task_id, by="test")

    assert not market.publish().duplicate


def test_ended_window_allows_next_run(market):
    market.publish()
    end_next_run(market)
    DedupeWindow.objects.update(ends_at=now() - timedelta(seconds=1))

    assert not market.publish().duplicate
    assert DedupeWindow.objects.get().ends_at > now()


def test_window_counts_from_the_start_of_a_delayed_job(market):
    market.publish(not_before=now() + timedelta(hours=5))

    assert DedupeWindow.objects.get().ends_at > now() + DAY + timedelta(hours=4)


def test_retry_of_failed_task_takes_the_window_along(market):
    market.publish()
    end_next_run(market, RunOutcome.BUSINESS)
    retried = retry_failed_task(FailedTask.objects.get().pk, Actor("test"))
    end_next_run(market)

    again = market.publish()

    assert (again.task_id, again.because) == (retried, "window")


def test_retry_is_refused_while_another_job_has_the_window(market):
    market.publish()
    end_next_run(market, RunOutcome.BUSINESS)
    holder = market.publish()
    end_next_run(market)
    failed = FailedTask.objects.get()
    with pytest.raises(Conflict, match=str(holder.task_id)):
        retry_failed_task(failed.pk, Actor("test"))

    failed.refresh_from_db()
    assert (failed.state, Job.objects.count(), DedupeWindow.objects.get().task_id) == ("open", 2, holder.task_id)


@pytest.mark.parametrize("ended", [True, False], ids=["its window ended", "the holder failed"])
def test_retry_without_a_window_claims_the_free_one(market, ended):
    market.publish()
    end_next_run(market, RunOutcome.BUSINESS)
    failed = FailedTask.objects.get()
    if ended:
        DedupeWindow.objects.all().delete()
    else:
        market.publish()
        end_next_run(market, RunOutcome.BUSINESS)
    retried = retry_failed_task(failed.pk, Actor("test"))
    end_next_run(market)

    again = market.publish()
    assert (again.task_id, again.because) == (retried, "window")


@each_row("request_of", [{"dedupe_key": ""}, {"touch_key": new_id()}])
def test_retry_of_a_job_that_never_merges_claims_no_window(market, request_of):
    Flow.objects.update(dedupe_by="none")
    market.publish(**request_of)
    end_next_run(market, RunOutcome.BUSINESS)
    retry_failed_task(FailedTask.objects.get().pk, Actor("test"))
    assert not DedupeWindow.objects.exists()


def test_refused_backlog_leaves_no_window(market):
    Shop.objects.update(backlog_limit=1)
    market.publish(dedupe_key="other")
    with pytest.raises(BacklogFull):
        market.publish()
    Shop.objects.update(backlog_limit=2)

    assert not market.publish().duplicate


def test_retention_deletes_ended_windows_only(market):
    market.publish()
    market.publish(dedupe_key="ended")
    DedupeWindow.objects.filter(key="ended").update(ends_at=now() - timedelta(days=2))

    assert delete_expired_in_table(WINDOWS, ends_at=now() + DAY) == 0, "created today"
    assert WINDOWS.delete(list(DedupeWindow.objects.values_list("pk", flat=True)), now()) == 1
    assert DedupeWindow.objects.get().key == ""


@pytest.mark.django_db(transaction=True)
def test_64_connections_race_for_one_window(market, race):
    """For a new one, then for that of the job that failed."""
    for outcome in (RunOutcome.BUSINESS, RunOutcome.SUCCEEDED):
        receipts = race(64, lambda number: market.publish(payload={"n": number}))

        (made,) = {receipt.task_id for receipt in receipts}
        assert sum(not receipt.duplicate for receipt in receipts) == 1
        assert Job.objects.filter(state__in=("scheduled", "queued")).count() == 1
        assert DedupeWindow.objects.get().task_id == made
        end_next_run(market, outcome)
    assert all(receipt.because == "window" for receipt in race(8, lambda _: market.publish()))
    assert Job.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_publishes_schedules_runs_and_retries_race_for_windows(market, race):
    """Each shop has at most one success in the window, and every window names a stored job."""
    shops = ["s1", *(f"n{number}" for number in range(7))]
    for shop_id in shops[1:]:
        market.shop(shop_id)

    def act(number):
        for turn in range(6):
            match (number + turn) % 4:
                case 0:
                    schedules.publish_round(1, sql.now(), [], ORDER)
                case 1:
                    if pick := market.pick():
                        market.settle(pick, "business" if (number + turn) % 8 == 1 else "succeeded")
                case _:
                    market.publish(shops[(number * 5 + turn) % len(shops)])

    race(16, act)
    while market_waits():
        end_next_run(market)
    for shop_id in shops:
        market.publish(shop_id)
    while market_waits():
        end_next_run(market)
    succeeded = Job.objects.filter(state="succeeded").values_list("shop__shop_id", flat=True)
    assert sorted(succeeded) == sorted(shops)
    assert set(DedupeWindow.objects.values_list("task_id", flat=True)) <= set(Job.objects.values_list("pk", flat=True))


@pytest.mark.django_db(transaction=True)
def test_publish_that_lost_a_window_keeps_no_lock_on_it(market, second_connection):
    """It merges into the winner's job next, whose run locks the job, then the window."""
    claims = []

    def lose(execute, query, *rest):
        if "INSERT INTO rpa_tasks_dedupewindow" in query:
            claims.append(second_connection(market.publish))
        elif claims and "FOR NO KEY UPDATE" in query:
            claims.append(second_connection(lock_window))
        return execute(query, *rest)

    with connection.execute_wrapper(lose):
        merged = market.publish()

    assert claims == [replace(merged, duplicate=False, because=""), True]
    assert merged.because == "waiting"


@transaction.atomic
def lock_window():
    """Return whether the only window can be locked at once."""
    return DedupeWindow.objects.select_for_update(skip_locked=True).exists()


def market_waits():
    return Job.objects.filter(state__in=("scheduled", "queued")).exists()


# --- due dates --------------------------------------------------------------------------------------------------------


def test_due_date_is_stored_and_merging_keeps_the_earlier(market):
    six, seven = now() + timedelta(hours=6), now() + timedelta(hours=7)
    market.publish(deadline=seven)
    market.publish(deadline=six)
    market.publish()

    assert Job.objects.get().deadline == six


@each_row("start", [{}, {"delay": timedelta(hours=1)}, {"not_before": now() + timedelta(hours=1)}])
def test_due_date_before_the_start_is_refused(market, start):
    with pytest.raises(InvalidInput) as caught:
        market.publish(deadline=now() - timedelta(minutes=1), **start)
    assert [error.field for error in caught.value.errors] == ["due_at"]


def test_not_before_delays_the_start(market):
    at = now() + timedelta(hours=3)
    receipt = market.publish(not_before=at)
    job = Job.objects.get(pk=receipt.task_id)

    assert abs(job.due_at - at) < timedelta(seconds=1)
    assert not market.publish(dedupe_key="at once", not_before=now() - timedelta(days=400)).duplicate
    assert Job.objects.get(dedupe_key="at once").due_at <= now()
    with pytest.raises(InvalidInput, match="not_before"):
        market.publish(dedupe_key="far", not_before=now() + timedelta(days=91))


# --- touches ----------------------------------------------------------------------------------------------------------


def test_touch_obeys_the_window_and_keeps_the_waiting_payload(market):
    """The same shop, flow and key run once in the window, also for a touch."""
    first = market.publish(touch_key=new_id(), payload={"to": "ann"})
    waiting = market.publish(touch_key=new_id(), payload={"to": "bob"}, priority=0)
    assert (waiting.task_id, waiting.because) == (first.task_id, "waiting")
    assert list(Job.objects.values_list("payload", "priority", "requests")) == [({"to": "ann"}, 0, 2)]
    end_next_run(market)

    refused = market.publish(touch_key=new_id(), payload={"to": "cid"})

    assert (refused.task_id, refused.because) == (first.task_id, "window")
    assert market.publish().because == "window"
    assert Job.objects.count() == 1


def test_touch_sent_again_gets_its_first_job(market):
    touch = new_id()
    first = market.publish(touch_key=touch)
    end_next_run(market)
    DedupeWindow.objects.update(ends_at=now() - timedelta(seconds=1))

    assert market.publish(touch_key=touch).task_id == first.task_id


@each_row("changes", [{"dedupe_by": "none"}, {"dedupe_window": None}])
def test_touches_without_a_common_window_get_a_job_each(market, changes):
    Flow.objects.update(**changes)
    assert not any(market.publish(touch_key=new_id()).duplicate for _ in range(2))
    assert not DedupeWindow.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_racing_touches_of_one_window_get_one_job(market, race):
    receipts = race(8, lambda number: market.publish(touch_key=new_id(), payload={"no": number}))
    assert len({receipt.task_id for receipt in receipts}) == Job.objects.count() == 1


# --- periods of the clock ---------------------------------------------------------------------------------------------


@pytest.fixture
def daily(market):
    """In a zone where it is noon: no day ends during a test."""
    zone = f"Etc/GMT{sql.now().hour - 12:+d}"  # named by its distance to UTC with the sign reversed
    Flow.objects.update(dedupe_window=None, dedupe_period="day", dedupe_timezone=zone)
    return Flow.objects.get()


@each_row(
    "period, zone, at, name, ends_at",
    [
        ("day", "Asia/Shanghai", "2026-11-26T15:59:59", "2026-11-26", "2026-11-26T16:00:00"),
        ("day", "Asia/Shanghai", "2026-11-26T16:00:00", "2026-11-27", "2026-11-27T16:00:00"),
        ("day", "America/New_York", "2026-11-01T12:00:00", "2026-11-01", "2026-11-02T05:00:00"),  # has 25 hours
        ("week", "UTC", "2027-01-03T23:00:00", "2026-W53", "2027-01-04T00:00:00"),
        ("month", "UTC", "2026-12-31T00:00:00", "2026-12", "2027-01-01T00:00:00"),
        ("hour", "Asia/Kolkata", "2026-11-26T00:29:59", "2026-11-26T05+0530", "2026-11-26T00:30:00"),
        ("hour", "America/New_York", "2026-11-01T05:30:00", "2026-11-01T01-0400", "2026-11-01T06:00:00"),
        ("hour", "America/New_York", "2026-11-01T06:30:00", "2026-11-01T01-0500", "2026-11-01T07:00:00"),  # again 1:30
    ],
)
def test_find_period_keeps_to_the_clock_of_its_zone(period, zone, at, name, ends_at):
    flow = Flow(dedupe_period=period, dedupe_timezone=zone)
    found = payloads.find_period(flow, datetime.fromisoformat(at).replace(tzinfo=UTC))

    assert (found[0], found[1].astimezone(UTC)) == (name, datetime.fromisoformat(ends_at).replace(tzinfo=UTC))


def test_period_refuses_a_second_run_and_the_next_one_allows_it(market, daily):
    at = sql.now()
    first = market.publish(payload={"page": 1})
    assert market.publish(payload={"page": 2}).because == "waiting"
    end_next_run(market)
    again = market.publish()
    assert (again.task_id, again.because) == (first.task_id, "window")
    assert again.window_ends_at
    assert abs(again.window_ends_at - payloads.find_period(daily, at)[1]) < timedelta(seconds=5)

    tomorrow = market.publish(not_before=at + DAY)
    assert not tomorrow.duplicate
    assert market.publish().because == "window", "the job for tomorrow does not stand in for today"
    assert market.publish(not_before=at + DAY).task_id == tomorrow.task_id
    assert Job.objects.count() == 2


def test_ways_to_publish_share_the_period(market, daily):
    market.shop("s2")
    assert schedules.publish_round(1, sql.now(), [], ORDER) == RoundCounts(published=2)
    wishes = [PublishRequest(shop_id=shop_id, **ORDER) for shop_id in ("s1", "s2")]
    assert {receipt.because for receipt in publish_many(wishes)} == {"waiting"}
    end_next_run(market)
    end_next_run(market)
    assert {receipt.because for receipt in publish_many(wishes)} == {"window"}
    assert schedules.publish_round(1, sql.now(), [], ORDER) == RoundCounts(waiting=2)
    assert market.publish(touch_key=new_id()).because == "window"
    later = [replace(wish, not_before=sql.now() + 2 * DAY) for wish in wishes]
    assert [receipt.duplicate for receipt in publish_many(later)] == [False, False]
    assert Job.objects.count() == DedupeWindow.objects.count() == 4


def test_late_schedule_belongs_to_the_period_in_which_it_fell_due(market, daily):
    """Beat publishes it after midnight. The punctual round of the next day runs as well."""
    yesterday = sql.now() - DAY
    for schedule_id in (1, 2):  # two schedules of one flow, both late: the work of that day runs once
        order = ORDER | {"due_seconds": 3_600}
        schedules.publish_round(schedule_id, yesterday, [], order)
        if schedule_id == 1:
            end_next_run(market)

    job = Job.objects.get()
    assert job.dedupe_key == add_period("", payloads.find_period(daily, yesterday)[0])
    assert (job.state, job.deadline) == ("succeeded", yesterday + timedelta(hours=1))
    assert DedupeWindow.objects.get().ends_at <= sql.now() + DAY
    assert not market.publish().duplicate


def test_retry_keeps_the_period_and_a_repetition_its_own_key(market, daily):
    market.publish(dedupe_key="batch-7")
    end_next_run(market, RunOutcome.BUSINESS)
    retried = retry_failed_task(FailedTask.objects.get().pk, Actor("test"))
    end_next_run(market)
    job = Job.objects.select_related("shop__platform", "flow").get(pk=retried)
    repeated = repeat_request(job, "test")
    assert repeated.dedupe_key == "batch-7"
    assert publish_job(repeated).because == "window"


def test_long_key_leaves_no_room_for_the_period(market, daily):
    with pytest.raises(InvalidInput, match="dedupe_key"):
        market.publish(dedupe_key="x" * 200)


@pytest.mark.django_db(transaction=True)
def test_16_connections_race_for_today_and_tomorrow(market, daily, race):
    at = sql.now()
    receipts = race(16, lambda number: market.publish(not_before=at + DAY if number % 2 else None))

    for tasks in ({each.task_id for each in receipts[::2]}, {each.task_id for each in receipts[1::2]}):
        assert len(tasks) == 1
    assert sum(not receipt.duplicate for receipt in receipts) == Job.objects.count() == 2
    end_next_run(market)
    assert all(receipt.because == "window" for receipt in race(16, lambda _: market.publish()))
    assert Job.objects.count() == 2
