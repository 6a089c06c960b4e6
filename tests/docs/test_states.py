"""The drawings of the states show what the ledger does: every move is tried from every state, on real rows."""

import re
from datetime import timedelta
from functools import partial
from uuid import UUID

import pytest
from django.db import transaction
from django.utils.timezone import now

from config.environment import ROOT
from rpa_tasks.jobs.ledger import job_ledger
from rpa_tasks.models import Flow, Job, JobState, Lane, Platform, Shop
from scheduling.errors import Conflict
from scheduling.ids import new_id
from scheduling.ledger.new_touches import insert_retry
from scheduling.ledger.touches import touch_ledger
from scheduling.ledger.transitions import Claim, Settlement
from scheduling.models import FailedTask, Touch, TouchState
from scheduling.operations import failed_tasks
from scheduling.operations.failed_tasks import Actor
from scheduling.policy.guards import GuardVerdict
from tests.support.claims import claim_touches

LEASE = timedelta(seconds=45)
SOON = timedelta(seconds=30)
pytestmark = pytest.mark.django_db


def read_drawing(title):
    """Return the arrows and the ends that docs/explanation/states.md draws for a touch, a job or a failed task."""
    page = (ROOT / "docs" / "explanation" / "states.md").read_text("utf-8")
    drawing = page.partition(f"\n## {title}\n")[2].partition("```mermaid\n")[2].partition("```")[0]
    arrows = re.findall(r"^ +(\w+) --> (\w+)", drawing, re.MULTILINE)
    return set(arrows), set(re.findall(r"^ +(\w+) --> \[\*\]", drawing, re.MULTILINE))


def set_state(model, task_id, state):
    """In this state, as the ledger would have left it, with a lease that has run out."""
    leased = state == "running" or (state == "queued" and model is Touch)
    dispatched = {"queued_at": None} if model is Touch else {}
    Lane.objects.update(task_id=None)
    model.objects.filter(pk=task_id).update(
        state=state, due_at=now() - timedelta(seconds=1), lease_no=7, sending_at=None,
        lease_until=now() - timedelta(seconds=1) if leased else None, **dispatched,
    )  # fmt: skip


def touch_moves(task_id):
    """Return every operation on a touch but its ends."""
    return [
        lambda: touch_ledger.dispatch_due(horizon=SOON),
        lambda: touch_ledger.requeue_expired(trusted_since={}),
        lambda: claim_touches([task_id]),
        touch_ledger.expired_runs,
        lambda: touch_ledger.cancel([task_id], reason="test"),
        lambda: touch_ledger.reschedule([task_id], [now()], expires_after=LEASE),
        lambda: touch_ledger.resume_paused("all", spread=SOON),
    ]


def job_moves(task_id):
    """Return every operation on a job but its ends."""
    return [
        lambda: job_ledger.dispatch_due(horizon=SOON),
        lambda: job_ledger.pick(["normal"], node="n1", lease=LEASE),
        job_ledger.expired_runs,
        lambda: job_ledger.cancel([task_id], reason="test"),
    ]


def collect_moves(settle, model, task_id, states, acts):
    """The arrows of all moves from all states."""
    ends = [state for state in states if state not in ("queued", "running")]
    settles = [partial(settle, Claim(task_id, 7), Settlement(state, due_at=now())) for state in ends]
    found = set()
    for state in states:
        for act in [*acts, *settles]:
            set_state(model, task_id, state)
            with transaction.atomic():
                act()
            found.add((state, model.objects.get(pk=task_id).state))
    return {(before, after) for before, after in found if before != after}


@pytest.fixture
def touch(matrix, record_event):
    matrix.node()
    (task_id,) = record_event().task_ids
    assert isinstance(task_id, UUID)
    return task_id


@pytest.fixture
def job(db):
    platform = Platform.objects.create(key="pdd")
    shop = Shop.objects.create(platform=platform, shop_id="s1")
    flow = Flow.objects.create(platform=platform, task_type="sync", command=["true", "{param}"], needs_browser=False)
    return Job.objects.create(shop=shop, flow=flow, due_at=now(), planned_at=now()).task_id


def test_touch_moves_match_the_drawing(touch):
    ends = set(TouchState.values) - {"scheduled", "queued", "running"}

    def settle(claim, settlement):
        return touch_ledger.settle({claim: settlement})

    found = collect_moves(settle, Touch, touch, TouchState.values, touch_moves(touch))
    assert read_drawing("A touch") == (found, ends)


def test_job_moves_match_the_drawing(job):
    ends = set(JobState.values) - {"scheduled", "queued", "running"}
    found = collect_moves(job_ledger.settle, Job, job, JobState.values, job_moves(job))
    assert read_drawing("A job") == (found, ends)


def test_write_decisions_moves_match_the_drawing(touch):
    """A claim and what follows from it, in one write: queued → running → its end."""
    arrows, _ends = read_drawing("A touch")
    for state in ("running", *(after for before, after in arrows if before == "running")):
        set_state(Touch, touch, "queued")
        decision = Settlement(state, due_at=now(), verdict=GuardVerdict("send"))
        touch_ledger.write_decisions({decision: [touch]}, at=now(), lease=LEASE)
        row = Touch.objects.get(pk=touch)
        assert (row.state, row.lease_no) == (state, 8)


def act_on(row, act):
    try:
        with transaction.atomic():
            act(row.pk, Actor("ann", reason="test"))
    except Conflict:
        pass
    return str(FailedTask.objects.get(pk=row.pk).state)


def undo_retry(failed_id, actor):
    """Take back the retry as which the failed task counts, whatever its state."""
    row, again = FailedTask.objects.get(pk=failed_id), new_id()
    assert row.task_id
    insert_retry(row.task_id, again, now(), as_new=False)
    FailedTask.objects.filter(pk=failed_id).update(retried_as=again)
    failed_tasks.withdraw_retry(str(failed_id), actor, retried={str(failed_id): str(again)}, as_new=False)


def test_failed_task_moves_match_the_drawing(touch):
    set_state(Touch, touch, "unknown")
    acts = [
        failed_tasks.retry_failed_task,
        failed_tasks.ignore_failed_task,
        failed_tasks.archive_failed_task,
        lambda pk, actor: failed_tasks.resolve_failed_task(pk, actor, delivered=True),
        lambda pk, actor: failed_tasks.resolve_failed_task(pk, actor, delivered=False),
        undo_retry,
    ]
    found = set()
    for state in FailedTask.State.values:
        for act in acts:
            FailedTask.objects.all().delete()
            Touch.objects.exclude(pk=touch).delete()
            row = FailedTask.objects.create(
                origin="touch", task_id=touch, root_id=new_id(), failure="unknown", reason="test", state=state
            )
            found.add((state, act_on(row, act)))
    ends = {"resolved_delivered", "resolved_not_delivered", "archived"}
    assert read_drawing("A failed task") == ({(before, after) for before, after in found if before != after}, ends)
