"""Bulk actions from the list of jobs, and the search in payloads."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.db.models.functions import Now
from django.utils.timezone import localtime, now

from rpa_tasks.jobs import queries as job_actions
from rpa_tasks.models import ExecutionNode, Flow, Job, Platform
from scheduling.admin.failed_tasks import bulk_action
from scheduling.models import BulkAction, FailedTask
from scheduling.operations import bulk_actions
from tests.rpa_tasks.admin.conftest import text, url
from tests.support.list_filters import find_ignored_parameters
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db

PACE = {"reason": "wrong price", "per_second": "200"}


#: By the address, how many unfinished jobs it means: a filter that is ignored would mean them all.
ADDRESSES = {
    "": 5, "status=due": 3, "status=late": 1, "status=x": 0, "state__exact=running": 1, "platform=pdd": 4,
    "platform=x": 0, "shop__id__exact={shop}": 2, "shop__id__exact=99999": 0, "task_type=other": 1, "task_type=x": 0,
    "reason=x": 1, "priority__exact=0": 1, "q=s2": 2, "q=k1": 1, "q=": 5, "q=s": 0, "q={task}": 1,
    "created_at_from_0={yesterday}": 4, "created_at_to_0={yesterday}": 1, "created_at_to_0=x": 0, "o=1&q=k1": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _start_at_once(monkeypatch):
    monkeypatch.setattr(bulk_action, "UNDO_WINDOW", timedelta(0))


def test_filters_of_jobs_select_for_bulk_cancel(operator, market):
    Flow.objects.create(platform=market.pdd, task_type="other", command=["true", "{param}"])
    running = market.running("s1")
    market.waiting("s1", dedupe_key="k1", priority=0, delay=timedelta(hours=1))
    late = market.waiting("s2", deadline=now() + timedelta(hours=1))
    other = market.waiting("s2", task_type="other")
    temu = Platform.objects.create(key="temu")
    Flow.objects.create(platform=temu, task_type="sync_order", command=["true", "{param}"])
    market.shop("t1", platform=temu)
    market.publish("t1", platform="temu")
    Job.objects.filter(pk=late.pk).update(deadline=now() - timedelta(minutes=1), reason="x")
    Job.objects.filter(pk=running.pk).update(created_at=now() - timedelta(days=3))
    given = {"shop": market.s1.pk, "task": other.pk, "yesterday": f"{localtime() - timedelta(days=1):%Y-%m-%d}"}
    found = {}
    for address in ADDRESSES:
        page = f"{url('job_matching', 'job.cancel')}?{address.format(**given)}"
        found[address] = int(read_context(operator, page)["facts"][0].split()[2])
    assert found == ADDRESSES


def test_job_filter_value_that_means_nothing_selects_no_row(operator, market):
    market.waiting("s1")
    assert find_ignored_parameters(operator, url("job_changelist")) == []


def test_matching_jobs_are_cancelled_by_workers(operator, market):
    market.waiting("s1", priority=0)
    kept = market.waiting("s2")
    links = read_context(operator, f"{url('job_changelist')}?priority__exact=0")["matching_links"]
    page = operator.get(links[0][0])
    assert "Applies to 1 job." in text(page)

    answer = operator.post(links[0][0], {**dict(page.context["hidden"]), **PACE})

    row = BulkAction.objects.get()
    assert (row.action, row.filter, row.reason) == ("job.cancel", {"priority__exact": "0"}, "wrong price")
    bulk_actions.continue_bulk_actions()
    shown = text(operator.get(answer["location"]))
    assert "Cancel jobs · RPA jobs" in shown
    assert f"{url('job_changelist')}?priority__exact=0" in shown
    assert list(Job.objects.exclude(state="cancelled").values_list("pk", flat=True)) == [kept.pk]


def test_action_of_the_list_affects_ticked_jobs_only(operator, market):
    chosen, _other = market.waiting("s1"), market.waiting("s2")
    cancel = {"action": "cancel_selected", "_selected_action": [str(chosen.pk)], "index": "0", "select_across": "1"}
    operator.post(url("job_changelist"), cancel)
    assert list(Job.objects.filter(state="cancelled")) == [chosen]


def test_matching_page_takes_priority_and_node_and_no_unknown_filter(operator, market):
    ExecutionNode.objects.create(name="n2", seen_at=now(), started_at=now(), slots=1)
    market.waiting("s1")
    operator.post(url("job_matching", "job.priority"), {**PACE, "priority": "high"})
    page = operator.get(url("job_matching", "job.move"))
    assert "login stays on the old node" in text(page)
    operator.post(url("job_matching", "job.move"), {**PACE, "node": "n2"})
    assert dict(BulkAction.objects.values_list("action", "given")) == {
        "job.priority": {"priority": "high"}, "job.move": {"node": "n2"},
    }  # fmt: skip
    assert operator.post(url("job_matching", "job.priority"), {**PACE, "priority": "urgent"}).status_code == 200
    assert operator.get(url("job_matching", "job.delete")).status_code == 404
    assert operator.get(f"{url('job_matching', 'job.cancel')}?payload__secret=1").status_code == 400


@pytest.mark.parametrize("handles", [True, False])
def test_matching_jobs_run_again_retry_failed_tasks_only_with_the_right(operator, market, handles):
    """The page of one job leaves the failed task open, too."""
    job = market.failed("s1")
    clerk = User.objects.create_user("clerk", is_staff=True)
    rights = ["view_job", "run_job", *(["act_on_failedtask"] if handles else [])]
    clerk.user_permissions.add(*Permission.objects.filter(codename__in=rights))
    operator.force_login(clerk)
    operator.post(url("job_matching", "job.run_again"), PACE)
    clerk.delete()  # the decision of the start holds
    BulkAction.objects.update(next_at=Now())
    bulk_actions.continue_bulk_actions()
    assert FailedTask.objects.get(task_id=job.pk).state == ("retried" if handles else "open")
    assert Job.objects.get(state__in=("scheduled", "queued")).retry_of == (job.pk if handles else None)


def test_payload_search_needs_the_right_to_payloads(operator, editor, market, monkeypatch):
    found, _other = market.waiting("s1", payload={"note": "双十一 50%_off"}), market.waiting("s2")

    def listed(client, term):
        return [row.pk for row in read_context(client, url("job_changelist"), {"q": term})["cl"].result_list]

    for term in ("双十一", "50%_OFF"):
        assert listed(editor, term) == [found.pk]
        assert listed(operator, term) == []
    assert listed(editor, "50__off") == []
    assert listed(editor, "s1") == [found.pk]
    assert "words of a recent payload" in text(editor.get(url("job_changelist")))

    # A count or a bulk action would show the same.
    assert "No row matches." in text(operator.get(f"{url('job_matching', 'job.cancel')}?q=双十一"))
    assert "Applies to 1 job." in text(editor.get(f"{url('job_matching', 'job.cancel')}?q=双十一"))
    editor.post(f"{url('job_matching', 'job.cancel')}?q=双十一", PACE)
    row = BulkAction.objects.get()
    assert (row.filter, row.total) == ({"q": "双十一"}, 1)
    assert "?q=%E5%8F%8C" in text(editor.get(f"/admin/scheduling/bulkaction/{row.pk}/change/"))

    monkeypatch.setattr(job_actions, "SEARCHED", 1)
    assert listed(editor, "双十一") == []
