"""One key for every producer: what waits takes in what comes, and nothing piles up unseen."""

import subprocess
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import product

import pytest
from django.db import connection
from django.utils.timezone import now
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.jobs.publish import BacklogFull
from rpa_tasks.models import Flow, Job
from rpa_tasks.supervisor import command
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.ledger.transitions import Settlement
from tests.support.tables import each_row


@pytest.fixture(autouse=True)
def shop(market):
    market.flow(dedupe_by="task_type")
    market.shop()


def test_publish_wakes_nodes_only_for_what_is_due_and_new(market, sent_wakeups, django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True):
        assert market.publish(dedupe_key="later", delay=timedelta(hours=2)).state == "scheduled"
    assert sent_wakeups == []
    with django_capture_on_commit_callbacks(execute=True):
        receipts = [market.publish(payload={"since": 1}) for _ in range(20)]
    assert (receipts[0].duplicate, receipts[0].state) == (False, "queued")
    assert [wakeup.task_id for wakeup in sent_wakeups] == [receipts[0].task_id]
    with django_capture_on_commit_callbacks(execute=True):
        market.publish(priority=0)
    assert len(sent_wakeups) == 2, "it is more urgent now"


def test_publish_merges_into_waiting_job(market):
    first = market.publish(payload={"page": 1}, priority=2, delay=timedelta(hours=1))
    second = market.publish(payload={"page": 2}, priority=0)

    job = Job.objects.get()
    assert (second.task_id, second.duplicate) == (first.task_id, True)
    assert (job.payload, job.priority, job.requests) == ({"page": 2}, 0, 2)
    assert job.due_at <= now()
    market.publish(payload={"page": 2}, priority=2, delay=timedelta(hours=1))
    job.refresh_from_db()
    assert (job.priority, job.requests) == (0, 3)
    assert job.due_at <= now(), "it stays as urgent as the most urgent request"


def test_publish_behind_running_job_keeps_one_waiting(market):
    running = market.publish()
    market.pick()
    behind = market.publish()
    third = market.publish()

    assert behind.task_id != running.task_id
    assert (third.task_id, third.duplicate) == (behind.task_id, True)


def test_publish_above_limit_of_shop_or_platform_is_refused(market):
    market.platform("tiny", backlog_limit=2)
    market.flow(platform="tiny")
    market.shop("a", "tiny", backlog_limit=1)
    market.shop("b", "tiny")
    market.publish("a", platform="tiny")
    with pytest.raises(BacklogFull, match="1 jobs wait"):
        market.publish("a", platform="tiny", dedupe_key="k")
    assert market.publish("a", platform="tiny").duplicate  # what merges takes no room
    market.publish("b", platform="tiny")

    with pytest.raises(BacklogFull):
        market.publish("b", platform="tiny", dedupe_key="k")


def test_publish_into_any_waiting_job_checks_each_payload_that_a_job_would_get(market):
    market.flow("sync_page", payload_schema={"type": "object", "required": ["page"]})
    with pytest.raises(InvalidInput):
        market.publish(task_type="sync_page", keeps_payload=True, merges_into_any=True)
    market.publish(task_type="sync_page", payload={"page": 1})
    with pytest.raises(InvalidInput):
        market.publish(task_type="sync_page", merges_into_any=True)

    assert market.publish(task_type="sync_page", keeps_payload=True, merges_into_any=True, priority=0).duplicate
    assert (Job.objects.get().payload, Job.objects.get().priority) == ({"page": 1}, 0)


def test_publish_into_any_waiting_job_needs_a_flow_that_merges(market):
    """The waiting job is of the time when the flow merged equal payloads."""
    flow = market.flow("reply", dedupe_by="payload")
    market.publish(task_type="reply", payload={"to": "ann"}, delay=timedelta(hours=1))
    assert not market.publish(task_type="reply", keeps_payload=True, merges_into_any=True, dedupe_key="").duplicate
    Flow.objects.filter(pk=flow.pk).update(dedupe_by="none")

    assert not market.publish(task_type="reply", keeps_payload=True, merges_into_any=True).duplicate
    assert Job.objects.count() == 3


@pytest.mark.django_db(transaction=True)
def test_publish_into_any_waiting_job_finds_the_one_behind_a_new_run(market, second_connection):
    """The first job starts between the look and the merge."""
    market.flow("reply", dedupe_by="payload")
    market.publish(task_type="reply", payload={"to": "ann"})
    behind = []

    def start_and_publish():
        assert market.pick()
        return market.publish(task_type="reply", payload={"to": "bob"})

    def start_first(execute, query, *rest):
        if not behind and "FOR NO KEY UPDATE" in query:
            behind.append(second_connection(start_and_publish))
        return execute(query, *rest)

    with connection.execute_wrapper(start_first):
        merged = market.publish(task_type="reply", keeps_payload=True, merges_into_any=True)

    assert [merged] == [replace(each, duplicate=True, because="waiting") for each in behind]


def test_publish_refuses_unstorable_payload_before_its_key(market):
    market.flow("reply", dedupe_by="payload", dedupe_window=timedelta(hours=1))
    for payload, touch in product(({"to": "\ud800"}, {"to": {"a", "set"}}), (None, new_id())):
        with pytest.raises(InvalidInput):
            market.publish(task_type="reply", payload=payload, touch_key=touch)


# --- which requests merge ------------------------------------------------------------------------------------------


def test_publish_during_retry_delay_merges_and_advances_job(market):
    first = market.publish(payload={"page": 1})
    pick = market.pick()
    job_ledger.mark_sending(pick.claim)
    retry_at = now() + timedelta(seconds=120)
    job_ledger.settle(pick.claim, Settlement("scheduled", "exit_1", due_at=retry_at))

    second = market.publish(payload={"page": 1}, priority=0)

    job = Job.objects.get()
    assert (second.task_id, second.duplicate) == (first.task_id, True)
    assert (job.priority, job.requests, job.root_id) == (0, 2, first.task_id)
    assert job.due_at <= now()
    assert market.pick().claim.task_id == first.task_id


def test_publish_beside_retry_merges_into_unstarted_job(market):
    """Its payload is newer than the retry's, however early the retry is due."""
    first = market.publish()
    pick = market.pick()
    second = market.publish()
    earlier = now() - timedelta(minutes=1)
    job_ledger.settle(pick.claim, Settlement("scheduled", "exit_1", due_at=earlier))

    third = market.publish()

    assert (third.task_id, third.duplicate) == (second.task_id, True)
    assert Job.objects.get(pk=first.task_id).requests == 1


@pytest.mark.parametrize("began", [True, False])
def test_publish_other_payload_into_started_retry_renews_key(market, began):
    """A receiver that knows the key would take the new payload for a repetition of the old one."""
    first = market.publish(payload={"text": "a"})
    pick = market.pick()
    if began:
        job_ledger.mark_sending(pick.claim)
    job_ledger.settle(pick.claim, Settlement("scheduled", "x", due_at=now()))

    market.publish(payload={"text": "b"})

    job = Job.objects.get()
    assert (job.task_id, job.payload) == (first.task_id, {"text": "b"})
    assert (job.root_id != first.task_id) == began


@pytest.mark.django_db(transaction=True)
def test_concurrent_publishes_create_one_job_and_merge_into_its_retry(market, race):
    receipts = race(16, lambda _: market.publish())
    assert sum(not each.duplicate for each in receipts) == 1
    assert Job.objects.get().requests == 16

    pick = market.pick()
    job_ledger.settle(pick.claim, Settlement("scheduled", "x", due_at=now()))
    assert all(each.duplicate for each in race(16, lambda _: market.publish()))
    assert Job.objects.get().requests == 32


def test_publish_merges_equal_payloads(market):
    market.flow("batch_reply")
    receipts = [
        market.publish(task_type="batch_reply", payload=payload)
        for payload in ({"to": "a", "n": 1}, {"n": 1, "to": "a"}, {"to": "b", "n": 1}, {"to": "a", "n": 1.5e300})
    ]

    assert [each.duplicate for each in receipts] == [False, True, False, False]
    assert market.publish(task_type="batch_reply", payload={"to": "a", "n": 1.5e300}).duplicate
    assert {job.payload["to"] for job in Job.objects.all()} == {"a", "b"}


def test_publish_without_a_key_never_merges(market):
    assert not any(market.publish(dedupe_key="").duplicate for _ in range(3))
    market.flow("reply", dedupe_by="none")
    assert not any(market.publish(task_type="reply").duplicate for _ in range(3))
    assert [market.publish(task_type="reply", dedupe_key="k").duplicate for _ in range(2)] == [False, True]


@each_row("name", command.RUN_MEMBERS)
def test_publish_refuses_payload_with_member_of_run_by_name(market, name):
    with pytest.raises(InvalidInput) as caught:
        market.publish(payload={"page": 1, name: "own"})
    assert [error.field for error in caught.value.errors] == [f"payload.{name}"]

    Flow.objects.update(param_style="nested")
    assert not market.publish(payload={"page": 1, name: "own"}).duplicate


def test_publish_accepts_large_payload_only_for_parameter_file(market):
    large = {"text": "x" * 200_000}
    with pytest.raises(InvalidInput, match="at most 65536"):
        market.publish(payload=large)
    assert not market.publish(payload={"text": "中" * 20_000}).duplicate, "60 KB as UTF-8"
    Flow.objects.update(command=["true", "{param_file}"])

    assert market.publish(payload=large).because == "waiting"
    with pytest.raises(InvalidInput, match="at most 524288"):
        market.publish(payload={"text": "x" * 600_000})


# --- what is accepted can be executed ------------------------------------------------------------------------------


def build_command(job, template):
    param = command.param_of(
        job.payload, nested=False, shop_id=job.shop.shop_id, platform="pdd", profile_id=job.shop.profile,
        task_id=str(job.pk), delivery_key=str(job.root_id), lease_no=1, debug_port=9222,
    )  # fmt: skip
    return command.argv_for(template, flow="pdd_x", param=param, timeout=timedelta(seconds=600))


TEMPLATES = [["/bin/true", "{param}"], ["/bin/true", "--p", "{param}", "{param}"]]
leaves = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**40), 10**40),
    st.none(),
    st.booleans(),
)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(leaf=leaves, count=st.integers(1, 9_000), template=st.sampled_from(TEMPLATES))
@example(leaf="中" * 20_000, count=1, template=TEMPLATES[0])
@example(leaf=1e300, count=9_000, template=TEMPLATES[0])  # 63 KB as it comes, 2.7 MB as it is stored
def test_accepted_payload_fits_on_command_line(market, leaf, count, template):
    flow = Flow.objects.filter(task_type="any").first() or market.flow("any")
    Flow.objects.filter(pk=flow.pk).update(command=template)
    with suppress(InvalidInput):
        market.publish(task_type="any", payload={"x": [leaf] * count}, dedupe_key="")
    if not Job.objects.exists():
        return
    job = Job.objects.select_related("shop__platform").get()
    Job.objects.all().delete()

    assert subprocess.run(build_command(job, template), check=False).returncode == 0
