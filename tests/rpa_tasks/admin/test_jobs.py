"""What a person reads about jobs, and does about them."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.urls import reverse
from django.utils import translation
from django.utils.timezone import now

from rpa_tasks.admin.job import OUTCOMES
from rpa_tasks.jobs.personal_data import erase_jobs_of_customer
from rpa_tasks.jobs.publish import request_cancel
from rpa_tasks.models import Evidence, Flow, Job, LoginState, Run, Shop
from rpa_tasks.outcomes import RunOutcome
from scheduling.admin.labels import translate_error
from scheduling.errors import Conflict
from scheduling.ledger.anonymization import Identity
from scheduling.models import FailedTask, Pause
from tests.rpa_tasks.admin.conftest import messages_of, text, url
from tests.support.undrawn import read_context

pytestmark = pytest.mark.django_db


def log_in_clerk(client, *rights):
    clerk = User.objects.create_user("clerk", is_staff=True)
    clerk.user_permissions.set(Permission.objects.filter(codename__in=rights))
    client.force_login(clerk)


def test_job_list_shows_progress_and_refreshes_open_jobs(viewer, market):
    running, failed = market.running("s1"), market.failed("s2")
    page = text(viewer.get(url("job_changelist")))
    assert 'value="40"' in page
    assert "page 4" in page
    assert f'id="{running.pk}-progress" data-live="{url("job_live")}" data-row="{running.pk}" data-live-again' in page
    assert f'data-row="{failed.pk}" data-live-again' not in page
    Job.objects.filter(pk=running.pk).update(progress=0.9)
    fresh = text(viewer.get(f"{url('job_live')}?ids={running.pk},{failed.pk}"))
    assert 'value="90"' in fresh
    assert "Ended with exit code 65" in fresh


def test_each_outcome_of_a_run_has_words_and_a_tone():
    assert set(RunOutcome) == set(Run.OUTCOMES) == set(OUTCOMES)


def test_pages_of_job_and_failed_task_show_runs_and_evidence(viewer, market):
    job = market.failed("s1", source="api: shop", payload={"day": "today"})
    Job.objects.filter(pk=job.pk).update(requests=3)
    page = text(viewer.get(url("job_change", job.pk)))
    failed = FailedTask.objects.get(task_id=job.pk)
    for words in ("api: shop", "merged into it", "Run 1: Failed for good", "42.0 s", "12 ms", "no such page",
                  "&quot;day&quot;", f"/admin/scheduling/failedtask/{failed.pk}/change/"):  # fmt: skip
        assert words in page, words
    told = text(viewer.get(f"/admin/scheduling/failedtask/{failed.pk}/change/"))
    for words in (url("job_change", job.pk), "The run failed", "Ended with exit code 65", "no such page"):
        assert words in told, words
    for piece in Evidence.objects.all():
        assert url("job_evidence", job.pk, piece.pk) in page
        assert url("job_evidence", job.pk, piece.pk) in told


def test_job_pages_redact_personal_data_and_secrets(viewer, operator, market):
    payload = {"phone": "13812345678", "api_token": "s3cr3t-9", "note": "call 13812345678"}
    job = market.failed("s1", payload=payload)
    Run.objects.filter(job=job).update(detail="call 13812345678 with token=s3cr3t-9")
    Job.objects.filter(pk=job.pk).update(result={"mobile": "13812345678"})
    failed = reverse("admin:scheduling_failedtask_change", args=[FailedTask.objects.get(task_id=job.pk).pk])
    pages = [viewer.get(url("job_change", job.pk)), viewer.get(failed), operator.get(url("job_again", job.pk))]
    for page in map(text, pages):
        assert "138****5678" in page
        assert "13812345678" not in page
        assert "s3cr3t" not in page
    job.refresh_from_db()
    assert job.payload == payload


def test_live_job_page_returns_body_only(viewer, market):
    job = market.running()
    part = text(viewer.get(url("job_change", job.pk), headers={"x-live": "1"}))
    assert "<html" not in part
    assert 'id="job-body"' in part
    assert "data-live-again" in part
    Job.objects.filter(pk=job.pk).update(state="succeeded", lease_until=None)
    assert "data-live-again" not in text(viewer.get(url("job_change", job.pk), headers={"x-live": "1"}))


def test_job_page_shows_why_job_waits(viewer, market):
    running, behind, job = market.running("s2"), market.waiting("s2"), market.waiting("s1")

    def why(job=job):
        reason, link = read_context(viewer, url("job_change", job.pk))["why"]
        return str(reason), link

    assert why(behind) == ("Another job of the shop is running", url("job_change", running.pk))
    assert why()[0] == "Waits for a free node"
    Job.objects.filter(pk=job.pk).update(due_at=now() + timedelta(days=5, hours=3, minutes=30))
    assert why()[0] == "starts in 5 days 3 hours"
    market.pdd.breaker.open_until = now() + timedelta(minutes=1)
    market.pdd.breaker.save()
    assert "platform blocks runs" in why()[0]
    Shop.objects.filter(pk=market.s1.pk).update(login_state=LoginState.NEEDED)
    assert why()[0] == "Shop needs a login"
    Shop.objects.filter(pk=market.s1.pk).update(paused=True)
    assert why()[0] == "The shop is paused"
    Pause.objects.create(scope="all")
    assert why()[0] == "Paused"


def test_evidence_runs_no_active_content(viewer, market):
    """The HTML is a strange site's: it must never run with our cookies."""
    job = market.failed()
    for piece in Evidence.objects.all():
        for address in (url("job_evidence", job.pk, piece.pk), f"{url('job_evidence', job.pk, piece.pk)}?save"):
            answer = viewer.get(address)
            assert answer["X-Content-Type-Options"] == "nosniff"
            assert "no-store" in answer["Cache-Control"]
            assert "sandbox" in answer["Content-Security-Policy"]
            assert "default-src 'none'" in answer["Content-Security-Policy"]
            assert not answer["Content-Type"].startswith(("text/html", "image/svg"))
            assert answer["Content-Disposition"].startswith("attachment" if "save" in address else "inline")
    html = viewer.get(url("job_evidence", job.pk, Evidence.objects.get(kind="html").pk))
    assert (html["Content-Type"], html.content) == ("text/plain; charset=utf-8", b"<script>alert(1)</script>")
    shot = Evidence.objects.get(kind="screenshot")
    assert viewer.get(url("job_evidence", job.pk, shot.pk))["Content-Type"] == "image/png"
    Evidence.objects.filter(pk=shot.pk).update(content=b"<svg onload=alert(1)>")
    strange = viewer.get(url("job_evidence", job.pk, shot.pk))
    assert strange["Content-Type"] == "application/octet-stream"
    assert strange["Content-Disposition"].startswith("attachment")


def test_evidence_requires_its_job_and_permission(viewer, market):
    one, other = market.failed("s1"), market.failed("s2")
    piece = Evidence.objects.filter(run__job=one)[0]
    assert viewer.get(url("job_evidence", other.pk, piece.pk)).status_code == 404
    log_in_clerk(viewer, "view_job")
    assert viewer.get(url("job_evidence", one.pk, piece.pk)).status_code == 403
    assert "evidence/" not in text(viewer.get(url("job_change", one.pk)))


def test_cancel_ends_waiting_job_and_requests_stop_of_running(operator, market):
    running, waiting = market.running("s1"), market.waiting("s2")
    assert "completed work stays" in text(operator.get(url("job_cancel", running.pk)))
    assert "The job was cancelled." in messages_of(operator.post(url("job_cancel", waiting.pk)))
    assert "within seconds" in messages_of(operator.post(url("job_cancel", running.pk)))
    assert "already ended" in messages_of(operator.post(url("job_cancel", waiting.pk)))
    running.refresh_from_db()
    waiting.refresh_from_db()
    assert (waiting.state, waiting.reason) == ("cancelled", "by:operator")
    assert running.cancel_requested_at is not None
    page = text(operator.get(url("job_change", running.pk)))
    assert "Stop requested" in page
    assert url("job_cancel", running.pk) not in page


def test_bulk_cancel_reports_running_jobs_and_is_undone_for_waiting_ones(operator, market):
    rows = [market.running("s1"), market.waiting("s1"), market.failed("s2")]
    chosen = {"action": "cancel_selected", "_selected_action": [str(row.pk) for row in rows]}
    page = operator.post(url("job_changelist"), chosen, follow=True)
    assert "2 jobs were cancelled. 1 of them is running" in " ".join(str(each) for each in page.context["messages"])
    (link,) = [message.extra_tags for message in page.context["messages"] if message.extra_tags]
    assert "Undone for 1 row." in text(operator.post(link, follow=True))
    assert Job.objects.get(retry_of=rows[1].pk).state == "scheduled"


def test_run_again_publishes_same_payload_and_merges(operator, market):
    job = market.failed("s1", payload={"day": "today"}, dedupe_key="k")
    FailedTask.objects.update(state="ignored")
    page = text(operator.get(url("job_again", job.pk)))
    assert "settles" not in page
    assert 'name="payload"' not in page
    answer = operator.post(url("job_again", job.pk), {"priority": "0", "payload": '{"day": "other"}'})
    again = Job.objects.get(state="queued")
    assert answer["location"] == url("job_change", again.pk)
    assert (again.payload, again.priority, again.dedupe_key, again.source) == (
        {"day": "today"}, 0, "k", "admin: operator",
    )  # fmt: skip
    assert "merged into a waiting job" in messages_of(operator.post(url("job_again", job.pk), {"priority": "1"}))
    assert Job.objects.get(pk=again.pk).requests == 2


def test_run_again_publishes_beside_a_waiting_job_with_another_payload(operator, market):
    job = market.failed("s1", payload={"to": "ann"})
    FailedTask.objects.update(state="ignored")
    Flow.objects.update(dedupe_by="payload")
    bob = market.waiting("s1", payload={"to": "bob"})
    operator.post(url("job_again", job.pk), {"priority": "1"})

    again = Job.objects.get(state="queued", payload={"to": "ann"})
    assert (again.source, Job.objects.get(pk=bob.pk).requests) == ("admin: operator", 1)


def test_run_again_by_editor_validates_new_payload(editor, market):
    market.sync.payload_schema = {"type": "object", "properties": {"day": {"type": "string"}}}
    market.sync.save()
    job = market.failed("s1", payload={"day": "today"})
    bad = editor.post(url("job_again", job.pk), {"priority": "1", "payload": '{"day": 3}'})
    assert "payload.day" in str(bad.context["form"].errors)
    bad = editor.post(url("job_again", job.pk), {"priority": "1", "payload": "{"})
    assert "not JSON" in str(bad.context["form"].errors)
    editor.post(url("job_again", job.pk), {"priority": "1", "payload": '{"day": "other"}'})
    assert Job.objects.get(retry_of=job.pk).payload == {"day": "other"}


def test_run_again_settles_the_open_failed_task(operator, market):
    job = market.failed("s1", payload={"day": "today"}, dedupe_key="k")
    page = text(operator.get(url("job_again", job.pk)))
    assert "settles the failed task" in page
    assert "stays open" not in page
    answer = operator.post(url("job_again", job.pk), {"priority": "0", "payload": '{"day": "other"}'})
    again = Job.objects.get(retry_of=job.pk)
    failed = FailedTask.objects.get(task_id=job.pk)
    assert answer["location"] == url("job_change", again.pk)
    assert (again.payload, again.priority, again.root_id) == ({"day": "today"}, 0, job.root_id)
    assert (failed.state, failed.retried_as, failed.actor_name) == ("retried", again.pk, "operator")


def test_run_again_of_a_covered_or_erased_job_reports_the_conflict(editor, market):
    job = market.failed("s1", dedupe_key="k", payload={"user_id": "ann-7731"})
    waiting = market.waiting("s1", dedupe_key="k")
    again = {"priority": "1", "payload": '{"user_id": "ann-7731"}'}
    shown = editor.post(url("job_again", job.pk), again)
    assert "waits already" in str(shown.context["form"].errors)
    assert FailedTask.objects.get(task_id=job.pk).state == "open"
    waiting.delete()
    erase_jobs_of_customer(Identity("ann-7731"))
    shown = editor.post(url("job_again", job.pk), again)
    assert "was erased" in str(shown.context["form"].errors)
    assert Job.objects.count() == 1


def test_run_again_without_the_right_leaves_the_failed_task_open(market, operator):
    job = market.failed("s1")
    log_in_clerk(operator, "view_job", "run_job")
    assert "stays open" in text(operator.get(url("job_again", job.pk)))
    operator.post(url("job_again", job.pk), {"priority": "1"})
    assert FailedTask.objects.get(task_id=job.pk).state == "open"
    assert Job.objects.filter(state="queued").exists()


def test_run_again_with_edited_payload_shows_the_difference_on_both_pages(editor, viewer, market):
    job = market.failed("s1", payload={"phone": "13812345678", "page": 1})
    editor.post(url("job_again", job.pk), {"priority": "1", "payload": '{"phone": "13987654321", "page": 2}'})
    again = Job.objects.get(retry_of=job.pk)
    failed = reverse("admin:scheduling_failedtask_change", args=[FailedTask.objects.get().pk])
    for page in (url("job_change", job.pk), url("job_change", again.pk), failed):
        shown = text(viewer.get(page))
        assert "138****5678</del>" in shown
        assert "139****4321</ins>" in shown
        assert "13812345678" not in shown
        assert "13987654321" not in shown


def test_error_line_precedes_the_folded_output(viewer, market):
    detail = "Traceback (most recent call last):\n  File 'flow.py'\nTimeoutError: no answer\nCall log:\n  - click"
    job = market.failed("s1", detail=detail)
    failed = reverse("admin:scheduling_failedtask_change", args=[FailedTask.objects.get().pk])
    for page in (url("job_change", job.pk), failed):
        shown = text(viewer.get(page))
        line, fold = shown.index('at-error-line">TimeoutError: no answer'), shown.index("Call log")
        assert line < fold
        assert '<details class="at-more" id="said-' in shown


def test_retried_job_and_failed_task_link_each_other(operator, market):
    job = market.failed()
    row = FailedTask.objects.get(task_id=job.pk)
    operator.post(reverse("admin:scheduling_failedtask_act", args=[row.pk, "retry"]), {"reason": "mended"})
    again = Job.objects.get(retry_of=job.pk)
    assert url("job_change", again.pk) in text(
        operator.get(reverse("admin:scheduling_failedtask_change", args=[row.pk]))
    )
    told = text(operator.get(url("job_change", job.pk)))
    assert url("job_change", again.pk) in told
    assert "mended" in told
    assert url("job_change", job.pk) in text(operator.get(url("job_change", again.pk)))


def test_refused_cancel_names_the_state_in_the_readers_language(market):
    job = market.failed("s1")
    with translation.override("zh-hans"):
        with pytest.raises(Conflict) as refused:
            request_cancel(job.pk, by="ann")
        assert str(refused.value) == "The job is Failed already."
        assert translate_error(str(refused.value)) == "任务状态已是“失败”。"
