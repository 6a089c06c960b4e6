"""A batch of requests gives the results and the jobs of single requests, one after the other."""

from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from django.db import OperationalError, transaction
from django.utils.timezone import now
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpa_tasks.jobs import publish
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.publish import (
    BacklogFull,
    PublishRequest,
    Receipt,
    publish_job,
    publish_many,
    request_cancel,
)
from rpa_tasks.models import DedupeWindow, Flow, Job, Lane, Platform, Shop
from scheduling import sql
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.ledger.transitions import Settlement
from tests.scheduling.api.serving import database_url

DAY = timedelta(days=1)
FLOWS = {
    "any": {"dedupe_by": "task_type"},
    "payload": {"dedupe_by": "payload"},
    "none": {"dedupe_by": "none", "dedupe_window": DAY},
    "refuse": {"dedupe_by": "task_type", "dedupe_window": DAY, "dedupe_rerun": "refuse"},
    "failed": {"dedupe_by": "payload", "dedupe_window": DAY, "dedupe_rerun": "after_failure"},
    "always": {"dedupe_by": "task_type", "dedupe_window": DAY, "dedupe_rerun": "always"},
}
REQUESTS = st.builds(
    dict,
    shop_id=st.sampled_from(["s1", "s1", "s2"]),
    task_type=st.sampled_from(list(FLOWS)),
    payload=st.sampled_from([{}, {}, {"no": 1}]),
    priority=st.sampled_from([0, 1, 2]),
    delay=st.sampled_from([timedelta(0), timedelta(hours=1)]),
    dedupe_key=st.sampled_from([None, None, None, "", "k"]),
    deadline=st.sampled_from([None, DAY, 2 * DAY]),
)
ODD_REQUESTS = st.builds(
    dict,
    shop_id=st.sampled_from(["s3", "unknown"]),
    task_type=st.sampled_from(["any", "unknown"]),
    payload=st.sampled_from([{"no": 1e20}, {"bad": "\0"}]),
    priority=st.sampled_from([0, 9]),
    delay=st.sampled_from([timedelta(0), timedelta(days=91)]),
    dedupe_key=st.sampled_from([None, "@reserved"]),
    deadline=st.none(),
)
STEPS = st.lists(
    st.one_of(
        st.lists(st.one_of(REQUESTS, REQUESTS, ODD_REQUESTS), min_size=6, max_size=16),
        st.sampled_from(["succeeded", "failed", "unknown", "run", "cancel", "expire"]),
    ),
    min_size=3, max_size=6,
)  # fmt: skip


def publish_singly(requests):
    results = []
    for request in requests:
        try:
            results.append(publish_job(request))
        except (InvalidInput, BacklogFull) as error:
            results.append(error)
    return results


def build_platform(key):
    platform = Platform.objects.create(key=key, backlog_limit=14)
    for number in range(1, 4):
        Shop.objects.create(platform=platform, shop_id=f"s{number}", backlog_limit=8)
    for task_type, changes in FLOWS.items():
        Flow.objects.create(platform=platform, task_type=task_type, command=["true", "{param}"], **changes)


def change_jobs(platform, step):
    """Bring about what a batch may meet: a running, ended or cancelled job, and ended windows."""
    waiting = Job.objects.filter(shop__platform__key=platform, state__in=("scheduled", "queued")).order_by("pk")
    if step == "expire":
        DedupeWindow.objects.filter(shop__platform__key=platform).update(ends_at=now() - timedelta(seconds=1))
    elif step == "cancel":
        for task_id in waiting.values_list("pk", flat=True)[:2]:
            request_cancel(task_id, by="test")
    else:
        free = waiting.filter(shop__lane__task_id=None).first()
        if free is not None:
            running = {"state": "running", "lease_until": now() + DAY, "fresh": False, "attempt": 1, "lease_no": 1}
            Job.objects.filter(pk=free.pk).update(**running)
            Lane.objects.filter(shop=free.shop_id).update(task_id=free.pk)
            if step != "run":
                free.refresh_from_db()
                ended = {"state": step, "lease_until": None, "settled_at": now()}
                Job.objects.filter(pk=free.pk).update(**ended)
                Lane.objects.filter(shop=free.shop_id).update(task_id=None)


def describe(platform, results):
    """Return results and rows without ids and times, which differ."""
    rows = list(Job.objects.filter(shop__platform__key=platform).select_related("shop", "flow").order_by("pk"))
    rows.sort(key=lambda row: (row.created_at, row.pk))
    kinds = {
        row.pk: (
            row.shop.shop_id, row.flow.task_type, row.state, row.priority, row.payload, row.requests, row.attempt,
            row.root_id == row.pk, row.deadline and round((row.deadline - now()) / DAY),
            round((row.due_at - now()) / timedelta(minutes=30)),
            row.dedupe_key if not row.dedupe_key.startswith("@task:") else "@task",
        )
        for row in rows
    }  # fmt: skip
    windows = DedupeWindow.objects.filter(shop__platform__key=platform).values_list("task_id", "key")
    held = sorted((repr(kinds.get(task_id)), key) for task_id, key in windows)
    return [describe_result(each, kinds, platform) for each in results], sorted(map(repr, kinds.values())), held


def describe_result(result, kinds, platform):
    if isinstance(result, Receipt):
        return result.duplicate, result.state, result.because, result.window_ends_at is None, kinds[result.task_id]
    assert isinstance(result, (InvalidInput, BacklogFull)), result
    return type(result).__name__, str(result).replace(platform, "")


@pytest.mark.django_db
@settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_batch_gives_results_and_rows_of_single_requests(steps):
    with transaction.atomic():
        build_platform("one")
        build_platform("two")
        for step in steps:
            shown = []
            for platform, publish in (("one", publish_singly), ("two", publish_many)):
                results = []
                if isinstance(step, str):
                    change_jobs(platform, step)
                else:
                    results = publish([build_request(platform, changes) for changes in step])
                shown.append(describe(platform, results))
            assert shown[0] == shown[1]
        transaction.set_rollback(True)


def build_request(platform, changes):
    deadline = now() + timedelta(hours=1) + changes["deadline"] if changes["deadline"] else None
    return PublishRequest(platform=platform, **{**changes, "deadline": deadline})


# --- races ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pdd(market):
    for number in range(10):
        market.shop(f"s{number}")
    market.flow("windowed", dedupe_by="task_type", dedupe_window=DAY)
    market.flow("plain", dedupe_by="task_type")

    def build(number):
        requests = [
            PublishRequest("pdd", f"s{shop}", task_type, priority=number % 3, source=f"client {number}")
            for shop in range(10)
            for task_type in ("windowed", "plain")
        ]
        return requests[::-1] if number % 2 else requests

    return build


@pytest.fixture
def patient_locks(monkeypatch):
    """On a slow machine a batch holds its locks for longer than the second after which another one reports an error."""
    wait = sql.brief_lock_waits
    monkeypatch.setattr(sql, "brief_lock_waits", lambda seconds=1.0: wait(60.0))


@pytest.mark.django_db(transaction=True)
def test_racing_batches_store_each_job_once(market, pdd, race, patient_locks):
    """16 connections publish the same keys in opposite orders."""
    answers = race(16, lambda number: publish_many(pdd(number)))

    receipts = [each for results in answers for each in results]
    assert all(isinstance(each, Receipt) for each in receipts), receipts
    assert Job.objects.count() == sum(not each.duplicate for each in receipts) == 20
    assert {each.task_id for each in receipts} == set(Job.objects.values_list("pk", flat=True))
    assert sum(Job.objects.values_list("requests", flat=True)) == 16 * 20
    assert DedupeWindow.objects.count() == 10


@pytest.mark.django_db(transaction=True)
def test_racing_batches_and_runs_keep_one_run_a_window(market, pdd, race, patient_locks):
    def act(number):
        if number < 12:
            return publish_many(pdd(number))
        for _ in range(20):
            if pick := market.pick(node=f"n{number}"):
                job_ledger.settle(pick.claim, Settlement("succeeded"))
        return []

    answers = race(16, act)

    assert all(isinstance(each, Receipt) for results in answers for each in results)
    assert Job.objects.filter(flow__task_type="windowed").count() == 10


@pytest.mark.django_db(transaction=True)
def test_batch_with_locked_job_answers_for_the_others(market, pdd):
    first = publish_many(pdd(0)[:3])
    assert isinstance(first[1], Receipt)
    with psycopg.connect(database_url()) as other:
        other.execute("SELECT FROM rpa_tasks_job WHERE task_id = %s FOR UPDATE", [first[1].task_id])
        results = publish_many(pdd(0)[:3])
    assert [isinstance(each, Receipt) for each in results] == [True, False, True]


@pytest.mark.django_db
def test_batch_tries_nothing_after_a_lost_connection(market, pdd, monkeypatch):
    """Each try would wait for PostgreSQL again, and the answer for all of them."""
    tries = []

    def lose(request):
        tries.append(request)
        raise OperationalError("connection lost")

    monkeypatch.setattr(publish, "publish_job", lose)
    results = publish_many([replace(each, touch_key=new_id()) for each in pdd(0)[:3]])
    assert [type(each) for each in results] == [OperationalError] * 3
    assert len(tries) == 1


# --- one request ----------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_batch_wakes_nodes_and_serves_touches(market, sent_wakeups, django_capture_on_commit_callbacks):
    market.shop()
    market.flow()
    request = PublishRequest("pdd", "s1", "sync_order")
    touch = replace(request, touch_key=new_id())
    with django_capture_on_commit_callbacks(execute=True):
        results = publish_many([request, touch, replace(request, priority=0), replace(request, delay=DAY)])
    receipts = [each for each in results if isinstance(each, Receipt)]
    assert [each.duplicate for each in receipts] == [False, False, True, True]
    assert [(each.task_id, each.priority) for each in sent_wakeups] == [
        (receipts[0].task_id, 1), (receipts[0].task_id, 0), (receipts[1].task_id, 1),
    ]  # fmt: skip
