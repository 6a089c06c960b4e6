"""What becomes of a job, by what its command does. The commands, their guard and the database are real."""

import errno
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.conf import settings
from django.db import DataError, OperationalError, connection
from django.utils.timezone import now

from config.local.processes import wait_until
from rpa_tasks import isolation
from rpa_tasks.browsers import registry
from rpa_tasks.browsers.launch import NoBrowser
from rpa_tasks.jobs import dispatch
from rpa_tasks.jobs.ledger import JobLedger, job_ledger
from rpa_tasks.jobs.publish import request_cancel
from rpa_tasks.maintainer import cleaning
from rpa_tasks.models import Evidence, Flow, Job, Lane, LoginState, Shop
from rpa_tasks.supervisor import processes
from rpa_tasks.supervisor.runs import LEASE_NO, SHOP, STATE_DIR, TASK_ID, state_dir
from rpa_tasks.worker import runner
from rpa_tasks.worker.runner import unpack_text
from scheduling.models import FailedTask
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

EVERY = ("high", "normal", "low")
TABLE = {"transient": [70], "business": [65], "session": [77], "platform": [75]}


@pytest.fixture(autouse=True)
def _long_extension(monkeypatch):
    """A machine that stalls does not end the command: leases end when the test ends them."""
    monkeypatch.setattr(runner, "EXTENSION", 1000.0)
    monkeypatch.setattr(runner, "POLL_INTERVAL", 0.05)


def script(text):
    """A command that runs these lines with `param` at hand."""
    return ["{python}", "-c", f"import json, sys, time\nparam = json.loads(sys.argv[1])\n{text}", "{param}"]


@pytest.fixture
def run_script(market):
    """Publish a job whose command runs this text, let it run, and return what became of it."""

    def run_script(text, *, run=True, payload=None, **flow):
        market.flow("act", command=script(text), exit_codes=TABLE, **flow)
        market.shop()
        receipt = market.publish(task_type="act", payload=payload or {})
        if run:
            assert runner.run_startable_jobs(EVERY) == 1
        return Job.objects.get(pk=receipt.task_id)

    return run_script


def test_successful_command_settles_job_with_its_result_and_last_progress(run_script):
    job = run_script(
        "print(json.dumps({'progress': 0.9, 'message': 'page 9 of 9'}))\n"
        "print(json.dumps({'result': {'seen': param['page'], 'lease': param['lease_no']}}))",
        payload={"page": 3},
    )

    assert (job.state, job.result, job.attempt) == ("succeeded", {"seen": 3, "lease": job.lease_no}, 1)
    assert (job.progress, job.progress_message) == (1.0, "page 9 of 9")
    run = job.runs.get()
    assert (run.outcome, run.exit_code, run.node) == ("succeeded", 0, settings.AFTERTOUCH_NODE)
    assert Lane.objects.get().task_id is None
    assert Lane.objects.get().last_success_at
    assert not FailedTask.objects.exists()
    logs = Path(settings.AFTERTOUCH_STATE_DIR) / "rpa" / "logs"
    assert not list(logs.glob(f"{job.pk}*")), "the row of the run holds the relevant part"


def test_transient_failure_retries_three_times_then_fails(run_script, market):
    job = run_script("print('the page did not load'); sys.exit(70)")
    waits = []
    for _ in range(3):
        job.refresh_from_db()
        waits.append((job.due_at - job.runs.latest("id").ended_at).total_seconds())
        assert job.state == "scheduled"
        assert runner.run_startable_jobs(EVERY) == 0
        Job.objects.update(due_at=now())  # the clock moves to its time
        assert runner.run_startable_jobs(EVERY) == 1
    job.refresh_from_db()

    assert all(base * 0.9 <= wait <= min(120, base * 1.1) + 1 for base, wait in zip((30, 60, 120), waits, strict=True))
    assert (job.state, job.reason, job.attempt, job.failures) == ("failed", "exit_70", 4, 4)
    failed = FailedTask.objects.get()
    assert (failed.task_id, failed.failure, failed.channel) == (job.pk, "failed", "pdd/act")
    assert len(failed.attempts) == 4
    assert "the page did not load" in failed.detail
    assert set(Evidence.objects.values_list("kind", flat=True)) == {"log"}


def test_flat_parameter_never_replaces_members_of_run(run_script, market):
    """The flow was nested when the job was published."""
    job = run_script("pass", payload={"shop_id": "own"}, param_style="nested", run=False)
    Flow.objects.update(param_style="flat")
    assert runner.run_startable_jobs(EVERY) == 1

    job.refresh_from_db()
    assert (job.state, job.reason) == ("failed", "payload_reserved")
    assert "shop_id" in job.runs.get().detail


def test_command_that_no_form_would_store_is_refused_at_its_run(run_script):
    job = run_script("pass", run=False)
    Flow.objects.update(command=["sh", "-c", "touch started"])
    assert runner.run_startable_jobs(EVERY) == 1

    job.refresh_from_db()
    assert (job.state, job.reason) == ("failed", "command_not_valid")
    assert "command: must contain {param} or {param_file}" in FailedTask.objects.get().detail


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EACCES, "not_started")])
def test_run_without_working_directory_names_the_disk_only_if_it_is_full(run_script, monkeypatch, code, reason):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(runner, "make_run_directory", fail)
    job = run_script("pass")

    assert (job.state, job.reason) == ("scheduled", reason)
    assert os.strerror(code) in job.runs.get().detail


def test_lost_login_parks_shop_without_failure(run_script, market):
    job = run_script("sys.exit(77)")

    assert (job.state, job.reason, job.failures) == ("scheduled", "login_needed", 0)
    assert Shop.objects.get().login_state == LoginState.NEEDED
    assert runner.run_startable_jobs(EVERY) == 0
    assert not FailedTask.objects.exists()

    Shop.objects.update(login_state=LoginState.OK)
    assert runner.run_startable_jobs(EVERY) == 1


def test_timed_out_run_of_a_flow_that_is_not_idempotent_needs_a_person(run_script):
    job = run_script("time.sleep(60)", idempotent=False, timeout=timedelta(seconds=0.1))

    assert (job.state, job.reason) == ("unknown", "timeout")
    assert FailedTask.objects.get().task_id == job.pk


def test_run_without_its_required_result_fails(run_script):
    job = run_script("print('Traceback (most recent call last):', file=sys.stderr)", needs_result=True)

    assert (job.state, job.reason) == ("failed", "no_result")


def test_running_job_stores_progress_and_is_cancelled(run_script, race):
    job = run_script(
        "print(json.dumps({'progress': 0.4, 'message': 'page 2 of 5'}), flush=True); time.sleep(1000)", run=False
    )

    def ops(number):
        if number == 0:
            return runner.run_startable_jobs(EVERY)
        stored = Job.objects.filter(pk=job.pk, progress=0.4, progress_message="page 2 of 5")
        assert wait_until(stored.exists, WAIT_LIMIT), "no progress was stored"
        return request_cancel(job.pk, by="ops")

    assert race(2, ops) == [1, "cancel_requested"]
    job.refresh_from_db()
    assert (job.state, job.reason) == ("cancelled", "cancelled")
    assert job.runs.get().outcome == "cancelled"


def test_lease_is_renewed_while_command_runs(run_script, race, monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "RENEW_INTERVAL", 0.2)
    seen = tmp_path / "seen"
    job = run_script(f"import os\nwhile not os.path.exists('{seen}'): time.sleep(0.05)", run=False)
    leases = set()

    def look(number):
        if number == 0:
            return runner.run_startable_jobs(EVERY)
        deadline = time.monotonic() + WAIT_LIMIT
        try:
            while len(leases) < 3 and time.monotonic() < deadline:
                leases.update(Job.objects.filter(pk=job.pk, state="running").values_list("lease_until", flat=True))
                time.sleep(0.05)
        finally:
            seen.touch()
        return None

    race(2, look)
    assert len(leases) >= 3
    job.refresh_from_db()
    assert job.state == "succeeded"


@pytest.mark.parametrize(
    ("began", "idempotent", "failures", "state", "failures_after"),
    [
        (True, True, 0, "scheduled", 1),
        (True, True, 3, "failed", 4),
        (True, False, 0, "unknown", 1),
        (False, False, 0, "scheduled", 0),
    ],
)
@pytest.mark.django_db
def test_job_of_a_lost_worker_is_repeated_only_where_that_is_safe(
    run_script, market, began, idempotent, failures, state, failures_after
):
    job = run_script("pass", run=False, idempotent=idempotent)
    Job.objects.update(failures=failures)
    pick = market.pick()
    if began:
        job_ledger.mark_sending(pick.claim)
    Job.objects.update(lease_until=now() - timedelta(seconds=1))

    assert dispatch.rescue_expired_runs() == 1
    job.refresh_from_db()
    assert (job.state, job.reason, job.failures) == (state, "worker_lost", failures_after)
    assert [row.failure for row in FailedTask.objects.all()] == ([] if state == "scheduled" else [state])
    assert Lane.objects.get().task_id is None


def test_node_runs_at_most_its_slots(market, race, monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "AFTERTOUCH_RPA_SLOTS", 2)
    (tmp_path / "effects").touch()
    note, read = f"open('{tmp_path}/effects', 'a')", f"open('{tmp_path}/effects').read()"
    # The first waits for the second, however slowly a command starts. A third would start meanwhile.
    both = f"while {read}.count('+') < 2: time.sleep(0.02)"
    market.flow("act", command=script(f"{note}.write('+')\n{both}\ntime.sleep(0.3)\n{note}.write('-')"))
    for number in range(4):
        market.shop(f"s{number}")
        market.publish(f"s{number}", "act")

    race(4, lambda _: runner.run_startable_jobs(EVERY))
    while Job.objects.exclude(state="succeeded").exists():
        runner.run_startable_jobs(EVERY)

    most = level = 0
    for mark in (tmp_path / "effects").read_text():
        level += 1 if mark == "+" else -1
        most = max(most, level)
    assert most == 2


def test_stopping_node_returns_idempotent_run(run_script, race, monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "STOP_TIME_LIMIT", 0.2)
    job = run_script(f"open('{tmp_path}/began', 'w'); time.sleep(1000)", run=False)

    def act(number):
        if number == 0:
            return runner.run_startable_jobs(EVERY)
        assert wait_until((tmp_path / "began").exists, WAIT_LIMIT)
        runner.stopping[0] = 1
        return None

    try:
        race(2, act)
        assert runner.run_startable_jobs(EVERY) == 0, "it starts no other job"
    finally:
        runner.stopping[0] = 0
    job.refresh_from_db()
    assert (job.state, job.reason, job.failures) == ("scheduled", "node_stopping", 0)


@pytest.mark.django_db
def test_repeated_deferral_adds_a_run_only_for_another_reason(run_script, market):
    job = run_script("pass", run=False)
    for outcome, reason in (
        ("held", "browser_wait"), ("held", "browser_wait"), ("held", "profile_busy"), ("held", "browser_wait"),
        ("platform", "exit_75"), ("held", "browser_wait"),
    ):  # fmt: skip
        Job.objects.update(due_at=now())
        pick = market.pick()
        assert market.settle(pick, outcome, reason)

    reasons = job.runs.order_by("number").values_list("reason", flat=True)
    assert list(reasons) == ["browser_wait", "profile_busy", "exit_75", "browser_wait"]
    assert job.runs.get(number=1).lease_no == 4


def test_rescue_failure_of_one_job_keeps_the_others(run_script, market, monkeypatch):
    odd = run_script("pass", run=False)
    market.shop("s2")
    fine = market.publish("s2", "act")
    for pick in (market.pick(), market.pick()):
        job_ledger.mark_sending(pick.claim)
    Job.objects.update(lease_until=now() - timedelta(seconds=1))
    record_run = dispatch.record_run

    def record_or_fail(row, *details):
        if row.pk == odd.pk:
            raise DataError("smallint out of range")
        record_run(row, *details)

    monkeypatch.setattr(dispatch, "record_run", record_or_fail)
    assert dispatch.rescue_expired_runs() == 1
    assert Job.objects.get(pk=fine.task_id).state == "scheduled"
    assert Job.objects.get(pk=odd.pk).state == "running"


def test_settlement_with_unstorable_detail_keeps_outcome(run_script, monkeypatch):
    real = runner.settle_run

    def settle_or_fail(job, claim, ended):
        if ended.detail:
            raise DataError("not storable")
        return real(job, claim, ended)

    monkeypatch.setattr(runner, "settle_run", settle_or_fail)
    job = run_script("print('something odd')")

    assert job.state == "succeeded"


def test_lease_is_renewed_again_after_a_lost_connection(run_script, monkeypatch):
    """The start of a browser may take as long as the lease."""
    renewals = []
    renew = JobLedger.renew

    def fail_once(*given, **named):
        renewals.append(bool(renewals))
        if len(renewals) == 1:
            raise OperationalError("the connection was lost")
        return renew(*given, **named)

    def slow(*_, **__):
        assert wait_until(lambda: len(renewals) > 1, 30), "the lease is not renewed again"
        raise NoBrowser("browser_wait", "Every slot was busy.")

    monkeypatch.setattr(runner, "RENEW_INTERVAL", 0.01)
    monkeypatch.setattr(JobLedger, "renew", fail_once)
    monkeypatch.setattr(runner, "acquire_browser", slow)
    assert run_script("pass", needs_browser=True).reason == "browser_wait"
    assert Lane.objects.get().home == ""


def test_secret_variable_is_redacted_in_run_and_evidence(run_script, monkeypatch):
    monkeypatch.setenv("SHOP_TOKEN", "s3cr3t-of-the-shop")
    job = run_script("import os\nprint('token', os.environ['SHOP_TOKEN']); sys.exit(65)", environment=["SHOP_TOKEN"])

    assert (job.state, job.attempt) == ("failed", 1)
    run = job.runs.get()
    kept = unpack_text(bytes(Evidence.objects.get(run=run, kind="log").content)).decode()
    failed = FailedTask.objects.get()
    assert failed.reason == "exit_65"
    for text in (run.detail, kept, failed.detail, str(failed.attempts)):
        assert "token" in text
        assert "s3cr3t" not in text


def test_run_ends_processes_of_earlier_run(run_script, tmp_path):
    marks = {TASK_ID: "earlier", LEASE_NO: "0", SHOP: "pdd/s1", STATE_DIR: state_dir()}
    ready = tmp_path / "ready"
    left = [
        subprocess.Popen(["/bin/sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.05; done"], env=marks),
        subprocess.Popen(["/bin/sleep", "1000"], env=marks | {SHOP: "pdd/another"}),
    ]
    try:
        assert wait_until(ready.exists, WAIT_LIMIT)
        job = run_script(
            "print(json.dumps({'result': {'state': open(f\"/proc/{param['pid']}/stat\").read()"
            ".rpartition(')')[2].split()[0]}}))",
            payload={"pid": left[0].pid},
        )

        assert job.result == {"state": "Z"}, "the earlier process was alive when the command began"
        assert left[1].poll() is None
    finally:
        for process in left:
            process.kill()
            process.wait()


def test_run_waits_while_a_process_of_an_earlier_run_is_left(run_script, monkeypatch):
    marks = {TASK_ID: "earlier", LEASE_NO: "0", SHOP: "pdd/s1", STATE_DIR: state_dir()}
    with subprocess.Popen(["/bin/sleep", "1000"], env=marks) as left:
        try:
            with monkeypatch.context() as immortal:
                immortal.setattr(processes, "PROOF_SECONDS", 0.1)
                immortal.setattr("rpa_tasks.supervisor.runs.SWEEP_GRACE", 0.1)
                immortal.setattr(processes.Process, "send", lambda *_: None)
                job = run_script("pass")
            assert (job.state, job.reason, job.attempt) == ("scheduled", "processes_left", 0)
            assert left.poll() is None

            Job.objects.update(due_at=now())
            assert runner.run_startable_jobs(EVERY) == 1
            job.refresh_from_db()
            assert job.state == "succeeded"
        finally:
            left.kill()


def test_parameter_file_is_private_and_deleted(run_script, market):
    text = (
        "import json, os, sys\n"
        "path = sys.argv[1]\n"
        "param = json.load(open(path, encoding='utf-8'))\n"
        "print(json.dumps({'result': {'mode': oct(os.stat(path).st_mode & 0o777), 'path': path, 'param': param}}))"
    )
    words = ["{python}", "-c", text, "{param_file}", "{shop_id}", "{task_id}"]
    market.flow("act", command=words, exit_codes=TABLE)
    market.shop()
    receipt = market.publish(task_type="act", payload={"text": "中文"})
    assert runner.run_startable_jobs(EVERY) == 1

    job = Job.objects.get(pk=receipt.task_id)
    assert job.state == "succeeded"
    assert job.result["mode"] == "0o600"
    assert job.result["param"]["text"] == "中文"
    assert not Path(job.result["path"]).exists()


def test_command_starts_in_its_folder_with_its_variables(market, tmp_path):
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho "{\\"result\\": {\\"at\\": \\"$PWD\\", \\"mode\\": \\"$RPA_MODE\\"}}"\n')
    tool.chmod(0o755)
    flow = market.flow("act", command=["./tool", "{param}"], cwd=str(tmp_path), env={"RPA_MODE": "fast"})
    market.shop()
    market.publish(task_type="act")
    assert runner.run_startable_jobs(EVERY) == 1
    assert Job.objects.get().result == {"at": str(tmp_path), "mode": "fast"}
    assert tool.exists(), "the folder is not that of the run"

    Flow.objects.filter(pk=flow.pk).update(cwd=str(tmp_path / "gone"))
    market.publish(task_type="act", payload={"again": True})
    assert runner.run_startable_jobs(EVERY) == 1
    assert Job.objects.get(state="scheduled").reason == "directory_missing"


def test_link_in_place_of_the_working_directory_leads_nowhere(run_script, market, tmp_path):
    """The shop's browser can write beside the directories of its runs, and the names of later ones can be guessed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    job = run_script("open('made', 'w')", run=False)
    runs = registry.shop_runs_dir(job.shop.profile)
    for lease_no in range(1, 10):
        (runs / str(lease_no)).symlink_to(outside)
    assert runner.run_startable_jobs(EVERY) == 1

    job.refresh_from_db()
    assert (job.state, list(outside.iterdir())) == ("succeeded", [])


def test_leftover_runs_deletes_only_folders_of_ended_runs(run_script, market, tmp_path):
    """A hostile command left a link, a directory that may not be read, and one deeper than Python can recurse and a
    path can name.
    """
    job = run_script("pass", run=False)
    pick = market.pick()
    kept = registry.shop_runs_dir(job.shop.profile) / str(pick.claim.lease_no)
    left = registry.shop_runs_dir(job.shop.profile) / str(pick.claim.lease_no - 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    for folder in (kept, left):
        folder.mkdir()
        (folder / "param.json").write_text("{}")
    (left / "link").symlink_to(outside, target_is_directory=True)
    subprocess.run(
        [sys.executable, "-c", "import os\nfor _ in range(1100): os.mkdir('deep'); os.chdir('deep')"],
        cwd=left,
        check=True,
    )
    (left / "closed" / "inner").mkdir(parents=True)
    (left / "closed").chmod(0)

    def delete_some():
        cleaning.delete_left_runs()  # for at most 20 s; the next pass continues
        return not left.exists()

    assert wait_until(delete_some, WAIT_LIMIT)
    assert (kept.exists(), (outside / "file").read_text()) == (True, "kept")

    isolation.delete_directory(kept)
    assert not kept.exists()


def test_odd_folder_of_one_shop_keeps_no_left_run_of_another(settings, tmp_path):
    settings.AFTERTOUCH_STATE_DIR = tmp_path
    (registry.runs_dir() / "0").touch()  # stands for a folder that its shop has closed
    left = registry.shop_runs_dir("s1") / "1"
    left.mkdir()
    cleaning.delete_left_runs()
    assert not left.exists()


def test_successful_run_is_settled_before_browser_release(run_script, market, monkeypatch):
    """A worker that is killed while it gives the browser back loses nothing then."""

    class Killed(BaseException):
        pass

    class Browser:
        port, waited, warm, download_folder = 1, timedelta(0), False, "Downloads"

        def keep_downloads(self, folder):
            pass

        def stop_downloads(self):
            pass

        def release(self, dirty=False):
            raise Killed

    monkeypatch.setattr(runner, "acquire_browser", lambda *_, **__: Browser())
    with pytest.raises(Killed):
        run_script("sys.exit(0)", needs_browser=True, idempotent=False)

    assert Job.objects.get().state == "succeeded"
    assert Lane.objects.get().task_id is None


@pytest.mark.parametrize(
    ("step", "committed", "state", "reason"),
    [
        ("pick", True, "succeeded", ""),
        ("mark_sending", False, "scheduled", "internal_error"),
        ("mark_sending", True, "scheduled", "internal_error"),
        ("pin_to_node", False, "scheduled", "internal_error"),
    ],
)
def test_run_that_loses_its_connection_is_settled(run_script, monkeypatch, step, committed, state, reason):
    """PostgreSQL fails over, before or after the commit of a step. No command has started: the job may be repeated."""
    real = getattr(JobLedger, step)

    def lose_connection(*given, **named):
        monkeypatch.setattr(JobLedger, step, real)
        found = real(*given, **named) if committed else None
        connection.connection.close()
        return found if step == "pick" else real(*given, **named)

    monkeypatch.setattr(JobLedger, step, lose_connection)
    monkeypatch.setattr(runner, "acquire_browser", lambda *_, **__: SimpleNamespace(release=lambda dirty: None))
    job = run_script("pass", run=False, idempotent=False, needs_browser=step == "pin_to_node")
    assert runner.run_startable_jobs(EVERY) == 1

    job.refresh_from_db()
    assert (job.state, job.reason) == (state, reason)
    assert Lane.objects.get().task_id is None


def test_error_after_the_start_of_a_command_leaves_its_outcome_unknown(run_script, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a defect")

    monkeypatch.setattr(runner, "judge", fail)
    job = run_script("pass", idempotent=False)

    assert (job.state, job.reason) == ("unknown", "internal_error")
