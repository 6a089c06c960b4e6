"""In what state a run gives its browser back. The pool, its forwarder, the command and the database are real."""

import json
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from django.db import transaction
from django.utils.timezone import now

from config.local.processes import wait_until
from rpa_tasks.browsers import upkeep
from rpa_tasks.jobs import dispatch
from rpa_tasks.models import Job
from rpa_tasks.outcomes import CommandResult
from rpa_tasks.supervisor.client import SupervisedCommand
from rpa_tasks.worker import runner
from tests.rpa_tasks.browsers.browser_processes import extend_time_limits, read_slot_states
from tests.rpa_tasks.core.conftest import EVERY
from tests.rpa_tasks.core.test_runner import TABLE, script
from tests.support.thread_servers import serving_in_thread
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


class BrowserElsewhere(BaseHTTPRequestHandler):
    """What a browser with a blank page answers to the pool. It has no page to make evidence of."""

    def do_GET(self):
        answers = {
            "/json/version": {"webSocketDebuggerUrl": "ws://127.0.0.1/devtools/browser/1"},
            "/json/list": [{"id": "1", "type": "page", "url": "about:blank"}],
        }
        self.send_response(200 if self.path in answers else 404)
        self.end_headers()
        self.wfile.write(json.dumps(answers.get(self.path)).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def publish_job(market, settings, tmp_path, monkeypatch):
    """Publish a job whose command runs this text beside a browser elsewhere."""
    settings.AFTERTOUCH_STATE_DIR = tmp_path
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    extend_time_limits(monkeypatch)
    monkeypatch.setattr(runner, "EXTENSION", 1000.0)  # leases end when the test ends them
    monkeypatch.setattr(runner, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(runner, "SNAPSHOT_TIME_LIMIT", 0.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BrowserElsewhere)
    server.daemon_threads = True

    def publish_job(text, **flow):
        market.flow("act", command=script(text), exit_codes=TABLE, needs_browser=True, **flow)
        market.shop(browser={"cdp_url": f"http://127.0.0.1:{server.server_address[1]}"})
        return Job.objects.get(pk=market.publish(task_type="act").task_id)

    with serving_in_thread(server):
        yield publish_job
        assert upkeep.end_unused() == 0


def read_end(job):
    job.refresh_from_db()
    return job.state, job.reason


def test_failed_run_keeps_its_browser(publish_job):
    job = publish_job("sys.exit(65)")
    assert runner.run_startable_jobs(EVERY) == 1

    assert read_end(job) == ("failed", "exit_65")
    assert read_slot_states() == {"pdd-s1": "idle"}


def test_timed_out_run_ends_its_browser(publish_job):
    job = publish_job("time.sleep(1000)", timeout=timedelta(seconds=0.1))
    assert runner.run_startable_jobs(EVERY) == 1

    assert read_end(job) == ("scheduled", "timeout")
    assert read_slot_states() == {}


def test_run_with_remaining_processes_ends_its_browser(publish_job, monkeypatch):
    """The command has ended. The kernel has not ended one of its processes in time."""
    next_event = SupervisedCommand.next_event

    def leave_one(supervised, timeout):
        event = next_event(supervised, timeout)
        return replace(event, survivors=1) if isinstance(event, CommandResult) else event

    monkeypatch.setattr(SupervisedCommand, "next_event", leave_one)
    job = publish_job("pass")
    assert runner.run_startable_jobs(EVERY) == 1

    assert read_end(job) == ("succeeded", "survivors")
    assert read_slot_states() == {}


def test_run_with_lost_lease_ends_its_browser(publish_job, race, tmp_path):
    job = publish_job(f"open('{tmp_path}/began', 'w'); time.sleep(1000)")

    def act(number):
        if number == 0:
            return runner.run_startable_jobs(("high", "normal"))
        assert wait_until((tmp_path / "began").exists, WAIT_LIMIT)
        with transaction.atomic():  # the run renews no lease in between
            Job.objects.update(lease_until=now() - timedelta(seconds=1), priority=2)
            return dispatch.rescue_expired_runs()

    assert race(2, act) == [1, 1]
    assert read_end(job) == ("scheduled", "worker_lost")
    assert (job.failures, [run.reason for run in job.runs.all()]) == (1, ["worker_lost"])
    assert read_slot_states() == {}
