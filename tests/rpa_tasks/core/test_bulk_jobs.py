"""One action on all jobs that match a filter: cancel, run again, change the priority, move to another node."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import psycopg
import pytest
from django.db import connection
from django.utils.timezone import now

from config.local.processes import wait_until
from rpa_tasks.jobs import dead_letters
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.queries import JOB_ACTIONS, run_job_again
from rpa_tasks.jobs.schedules import publish_round
from rpa_tasks.models import ExecutionNode, Job, Lane
from scheduling import sql
from scheduling.errors import Conflict
from scheduling.ledger.transitions import Settlement
from scheduling.models import AuditEntry, FailedTask
from scheduling.operations import bulk_actions, failed_tasks
from scheduling.operations.failed_tasks import Actor
from tests.rpa_tasks.core.conftest import EVERY
from tests.scheduling.api.serving import database_url
from tests.scheduling.core.conftest import LATER

pytestmark = pytest.mark.django_db(transaction=True)
ANN = Actor("ann", reason="a mistake")
HOUR = timedelta(hours=1)


def finish(action, rows=None, **options):
    """Start an action on all jobs or on these, and process its batches at once."""
    row = bulk_actions.start_bulk_action(action, Job.objects.all() if rows is None else rows, ANN, **options)
    while bulk_actions.run_batch(row.pk, LATER):
        pass
    row.refresh_from_db()
    return row


def tally(row):
    return row.done, row.skipped, row.failed


@pytest.fixture
def shops(market):
    market.flow()
    for number in range(1, 4):
        market.shop(f"s{number}")
    return market


# --- cancel ---------------------------------------------------------------------------------------------------------


def test_bulk_cancel_ends_waiting_jobs_and_stops_running_ones(shops):
    running = shops.publish("s1").task_id
    assert shops.pick() is not None
    waiting, later = shops.publish("s2", delay=HOUR).task_id, shops.publish("s3", delay=HOUR, priority=0).task_id

    row = finish("job.cancel", Job.objects.filter(priority=1))

    assert (row.total, *tally(row)) == (2, 2, 0, 0)
    assert Job.objects.get(pk=running).cancel_requested_at is not None
    assert list(Job.objects.filter(pk__in=[waiting, later]).order_by("pk").values_list("state", "reason")) == [
        ("cancelled", "by:ann"), ("scheduled", ""),
    ]  # fmt: skip


def test_bulk_cancel_skips_locked_jobs(shops):
    """The batch holds locks of other jobs, so waiting for one could deadlock."""
    task_id = shops.publish("s1").task_id
    shops.publish("s2")
    with psycopg.connect(database_url()) as other:
        other.execute("SELECT FROM rpa_tasks_job WHERE task_id = %s FOR NO KEY UPDATE", [task_id])
        assert tally(finish("job.cancel")) == (1, 1, 0)
    assert Job.objects.get(pk=task_id).state == "queued"


def test_bulk_cancel_races_picks_and_settles(shops, race):
    """Each job either ends as cancelled, or its run learns of the cancellation or has settled before."""
    for number in range(4, 16):
        shops.shop(f"s{number}")
    task_ids = [shops.publish(f"s{number}").task_id for number in range(1, 16)]
    row = bulk_actions.start_bulk_action("job.cancel", Job.objects.all(), ANN)

    def act(number):
        if number == 0:
            return int(bulk_actions.run_batch(row.pk, LATER))
        settled = 0
        while pick := shops.pick(node=f"n{number}"):
            settled += job_ledger.settle(pick.claim, Settlement("succeeded"))
        return settled

    succeeded = sum(race(4, act)[1:])

    row.refresh_from_db()
    states = list(Job.objects.filter(pk__in=task_ids).values_list("state", flat=True))
    assert states.count("succeeded") == succeeded
    assert set(states) <= {"succeeded", "cancelled"}
    assert (row.state, row.failed, row.tries) == ("done", 0, 0)
    assert not Lane.objects.filter(task_id__isnull=False).exists()


# --- run again ------------------------------------------------------------------------------------------------------


def test_bulk_run_again_publishes_at_its_pace_and_settles_failed_tasks(shops):
    ends = {"s1": "succeeded", "s2": "failed", "s3": "cancelled"}
    for shop_id, state in ends.items():
        shops.end(shops.publish(shop_id, payload={"shop": shop_id}).task_id, state)

    row = finish("job.run_again", per_second=5)

    assert (row.total, *tally(row)) == (3, 3, 0, 0)
    made = list(Job.objects.filter(state__in=("scheduled", "queued")).select_related("shop").order_by("due_at"))
    assert [job.payload for job in made] == [{"shop": job.shop.shop_id} for job in made]
    assert {job.shop.shop_id: bool(job.retry_of) for job in made} == {"s1": False, "s2": True, "s3": False}
    assert all(later.due_at > sooner.due_at for sooner, later in pairwise(made))
    assert list(FailedTask.objects.values_list("state", "actor_name", "action_reason")) == [
        ("retried", "ann", "a mistake")
    ]


def test_bulk_run_again_skips_jobs_that_another_covers(shops):
    shops.flow("audit", dedupe_window=HOUR)
    shops.end(shops.publish("s1", payload={"no": 1}).task_id, "succeeded")
    waiting = shops.publish("s1", payload={"no": 1}, priority=2).task_id
    shops.end(shops.publish("s2", "audit").task_id, "succeeded")

    assert tally(finish("job.run_again")) == (0, 2, 0)
    for task_id in Job.objects.filter(state="succeeded").values_list("pk", flat=True):
        with pytest.raises(Conflict, match="covers it already"):
            run_job_again(task_id, ANN, due_at=sql.now())
    assert list(Job.objects.filter(pk=waiting).values_list("priority", "requests")) == [(2, 1)]


# --- priority -------------------------------------------------------------------------------------------------------


def test_bulk_priority_changes_waiting_jobs_and_wakes(shops, sent_wakeups):
    due, later = shops.publish("s1").task_id, shops.publish("s2", delay=HOUR).task_id
    shops.end(shops.publish("s3").task_id, "succeeded")
    shops.publish("s3", priority=0)
    sent_wakeups.clear()

    row = finish("job.priority", given={"priority": "high"})

    assert (row.given, tally(row)) == ({"priority": "high"}, (2, 1, 0))
    assert set(Job.objects.filter(pk__in=[due, later]).values_list("priority", flat=True)) == {0}
    assert [(each.task_id, each.priority) for each in sent_wakeups] == [(due, 0)]


def test_same_bulk_action_with_other_parameter_starts(shops):
    shops.publish("s1")
    bulk_actions.start_bulk_action("job.priority", Job.objects.all(), ANN, given={"priority": "high"})
    with pytest.raises(Conflict, match="already running"):
        bulk_actions.start_bulk_action("job.priority", Job.objects.all(), ANN, given={"priority": "high"})
    assert bulk_actions.start_bulk_action("job.priority", Job.objects.all(), ANN, given={"priority": "low"})


# --- move -----------------------------------------------------------------------------------------------------------


def test_bulk_move_pins_free_shops_and_skips_others(shops, sent_wakeups):
    shops.flow("browse", needs_browser=True)
    shops.node("n1")
    shops.node("n2")
    for shop_id in ("s1", "s2"):
        shops.publish(shop_id, "browse")
    shops.publish("s2", "browse", payload={"no": 2})
    shops.publish("s3")  # without a browser
    Lane.objects.filter(shop__shop_id="s1").update(held_until=now() + HOUR)
    Lane.objects.update(home="n1")
    sent_wakeups.clear()

    row = finish("job.move", given={"node": "n2"})

    assert (row.total, *tally(row)) == (4, 2, 2, 0)
    homes = Lane.objects.order_by("shop__shop_id").values_list("shop__shop_id", "home")
    assert list(homes) == [("s1", "n1"), ("s2", "n2"), ("s3", "n1")]
    moved = Lane.objects.get(home="n2").pk
    assert {each.owner for each in sent_wakeups} == {moved}
    entry = AuditEntry.objects.get(action="acted", kind="rpa_tasks.shop", object_id=str(moved))
    assert (entry.actor, entry.reason) == (ANN.name, "moved to node n2")


def test_bulk_move_skips_node_that_does_not_serve_or_report(shops):
    shops.flow("browse", needs_browser=True)
    shops.publish("s1", "browse")
    shops.node("n2", "low")
    assert tally(finish("job.move", given={"node": "n2"})) == (0, 1, 0)
    ExecutionNode.objects.update(queues=list(EVERY), seen_at=now() - HOUR)
    assert tally(finish("job.move", given={"node": "n2"})) == (0, 1, 0)
    assert Lane.objects.get(shop__shop_id="s1").home == ""


def test_move_locked_lane_does_not_wait(shops):
    shops.flow("browse", needs_browser=True)
    shops.node("n2")
    task_id = shops.publish("s1", "browse").task_id
    with psycopg.connect(database_url()) as other:
        other.execute("SELECT FROM rpa_tasks_lane FOR NO KEY UPDATE")
        with pytest.raises(Conflict, match="running"):
            JOB_ACTIONS["job.move"].act(task_id, ANN, given={"node": "n2"})


# --- races and deaths -----------------------------------------------------------------------------------------------


def test_bulk_actions_settle_and_schedule_do_not_deadlock(shops, race, settings):
    """Two bulk actions on the same jobs, picks with settles, and a schedule that publishes the same keys."""
    pks = {shop_id: pk for pk, shop_id in Lane.objects.values_list("pk", "shop__shop_id")}
    for number in range(4, 20):
        pks[f"s{number}"] = shops.shop(f"s{number}").pk
    for shop_id in sorted(pks, reverse=True):
        shops.end(shops.publish(shop_id).task_id, "failed" if int(shop_id[1:]) % 2 else "succeeded")
    others = Job.objects.exclude(shop=pks["s1"])  # the same rows would be the same action
    both = [
        bulk_actions.start_bulk_action("job.run_again", rows, ANN, per_second=200, chosen=chosen)
        for rows, chosen in ((others, {"status": ""}), (Job.objects.all(), {}))
    ]
    priority = bulk_actions.start_bulk_action("job.priority", Job.objects.all(), ANN, given={"priority": "low"})

    def act(number):
        if number < 2:
            bulk_actions.run_batch(both[number].pk, LATER)
        elif number == 2:
            publish_round(1, sql.now(), [], {"platform": "pdd", "task_type": "sync_order"})
        elif number == 3:
            bulk_actions.run_batch(priority.pk, LATER)
        else:
            for _ in range(10):
                if pick := shops.pick(node=f"n{number}"):
                    job_ledger.settle(pick.claim, Settlement("succeeded"))

    race(6, act)  # a deadlock would raise an error of PostgreSQL

    for row in (*both, priority):
        row.refresh_from_db()
        assert (row.state, row.failed, row.tries) == ("done", 0, 0)
    waiting = Job.objects.filter(state__in=("scheduled", "queued")).values_list("shop", flat=True)
    assert len(waiting) == len(set(waiting))  # one waiting job a key


# --- retries of failed jobs, while others publish the same keys -------------------------------------------------------


def fail_jobs(market, shop_ids, reason):
    """A job of each of these shops fails, one after the other."""
    for shop_id in shop_ids:
        market.end(market.publish(shop_id).task_id, reason=reason)


def lock_is_awaited():
    ((found,),) = sql.rows("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)", {})
    return bool(found)


class PublishBarrier:
    """Stop each publisher after its first job until another one has published, waits or has ended."""

    def __init__(self, monkeypatch):
        self.published = set()
        self.through = threading.Event()
        republisher = dead_letters.REPUBLISHER

        def publish(row, retry):
            edited = republisher.publish(row, retry)
            me = threading.get_ident()
            if me not in self.published:
                self.published.add(me)
                wait_until(lambda: len(self.published) > 1 or lock_is_awaited() or self.through.is_set(), 20)
            return edited

        slowed = replace(republisher, publish=publish)
        monkeypatch.setattr(failed_tasks, "find_republisher", lambda _origin: slowed)

    def run(self, *acts):
        def run(act):
            try:
                return act()
            finally:
                self.through.set()
                connection.close()

        with ThreadPoolExecutor(len(acts)) as pool:
            return [each.result(180) for each in [pool.submit(run, act) for act in acts]]


def test_concurrent_bulk_retries_of_same_keys_do_not_deadlock(shops, monkeypatch):
    """Without an order each held the key that the other inserts next: a deadlock, and one batch was undone."""
    fail_jobs(shops, ["s2", "s1"], "here")
    fail_jobs(shops, ["s1", "s2"], "there")
    rows = [
        bulk_actions.start_bulk_action("retry", FailedTask.objects.filter(reason=reason), ANN, chosen={"q": reason})
        for reason in ("here", "there")
    ]

    PublishBarrier(monkeypatch).run(*(lambda row=row: bulk_actions.run_batch(row.pk, LATER) for row in rows))

    for row in rows:
        row.refresh_from_db()
    assert [row.tries for row in rows] == [0, 0]
    assert sorted((row.done, row.skipped, row.failed) for row in rows) == [(0, 2, 0), (2, 0, 0)]
    assert sorted(Job.objects.filter(state="scheduled").values_list("shop__shop_id", flat=True)) == ["s1", "s2"]


def test_bulk_retry_and_round_of_same_shops_do_not_deadlock(shops, monkeypatch):
    fail_jobs(shops, ["s2", "s1"], "here")
    row = bulk_actions.start_bulk_action("retry", FailedTask.objects.filter(reason="here"), ANN)
    meeting = PublishBarrier(monkeypatch)

    def tick():
        wait_until(lambda: bool(meeting.published), 20)
        return publish_round(1, sql.now(), [], {"platform": "pdd", "task_type": "sync_order"})

    _, told = meeting.run(lambda: bulk_actions.run_batch(row.pk, LATER), tick)

    row.refresh_from_db()
    assert (row.tries, row.done, row.skipped) == (0, 2, 0)
    assert (told.published, told.waiting) == (1, 2)  # that of the third shop
