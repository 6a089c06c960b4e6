"""A real Prometheus scrapes a web process and a node's exporter, and our queries have answers there."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import yaml

from config.environment import ROOT
from config.local.isolated import running_stack
from config.local.processes import select_port, wait_until
from tests.deploy.test_monitoring import RULES, queries, rules
from tests.faults.brokers import Server
from tests.support.small_matrix import LOG, small_matrix
from tests.support.stack import StackUnderTest, cloud_event
from tests.support.waiting import WAIT_LIMIT

COUNT = """
from prometheus_client import Counter, Gauge
Counter("celery_task_succeeded", "…", ["name"]).labels("scheduling.rescue").inc(41)
Gauge("celery_worker_up", "…", ["hostname"], multiprocess_mode="livesum").labels("core@n1").set(1)
"""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="missing service: prometheus (Debian: prometheus)"
)


class Prometheus:
    """Asked with `max_over_time`, one good scrape is enough: on a machine that is busy others may be late."""

    def __init__(self, folder, targets):
        self.port = select_port()
        folder.mkdir()
        (folder / "alerts.yml").write_text(re.sub(r"for: \w+", "for: 1s", RULES.read_text()))
        configuration = {
            "global": {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": [{"job_name": "aftertouch", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        words = [
            f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]  # fmt: skip
        self.server = Server([str(shutil.which("prometheus")), *words], folder / "prometheus.log")

    def ask(self, path, **parameters):
        """The data of the answer; None while it does not answer."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_LIMIT) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def query(self, expression):
        found = self.ask("query", query=expression)
        return [] if found is None else found["result"]

    def await_query(self, expression):
        assert wait_until(lambda: bool(self.query(expression)), WAIT_LIMIT, pause=0.2), (
            f"no answer to {expression}: {self.ask('targets')}\n{self.server.log.read_text()[-3000:]}"
        )


@contextmanager
def prometheus(folder, targets):
    made = Prometheus(folder, targets)
    with made.server.standing():
        yield made


@contextmanager
def metrics_server(environment, folder):
    """As on a node without a web process. Where it listens."""
    port = select_port()
    words = [sys.executable, str(ROOT / "manage.py"), "serve_metrics", "--port", str(port)]
    local = {"DJANGO_SETTINGS_MODULE": "config.settings.local"}
    with Server(words, folder / "serve_metrics.log", {**local, **environment}).standing():
        yield f"127.0.0.1:{port}"


def test_prometheus_scrapes_web_and_exporter_and_runs_queries(live_server, valkey, tmp_path):
    folder = tmp_path / "metrics"
    folder.mkdir()
    counting = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", COUNT], env=counting, check=True)
    web = live_server.url.removeprefix("http://")
    with ExitStack() as running:
        exporter = running.enter_context(metrics_server({"AFTERTOUCH_METRICS_DIR": str(folder)}, tmp_path))
        scraper = running.enter_context(prometheus(tmp_path / "prometheus", [web, exporter]))
        for target in (web, exporter):
            scraper.await_query(f'max_over_time(up{{job="aftertouch", instance="{target}"}}[5m]) == 1')
        scraper.await_query(f'max_over_time(celery_task_succeeded_total{{instance="{exporter}"}}[5m]) == 41')
        scraper.await_query('max_over_time(celery_queue_length{queue_name="touch.high"}[5m]) == 0')
        scraper.await_query("max_over_time(aftertouch_touches_oldest_overdue_seconds[5m]) == 0")
        scraper.await_query('ALERTS{alertname="NoCoreWorker", alertstate="firing"}')
        assert not scraper.query("celery_worker_up"), "who counted is gone"
        assert not scraper.query(f'aftertouch_touches{{instance="{exporter}"}}'), "told once, not by every node"
        for expression in [*queries(), *(rule["expr"] for rule in rules())]:
            asked = expression.replace("$__rate_interval", "1m")
            assert scraper.ask("query", query=asked) is not None, f"not taken: {asked}"


def send_orders(stack, count, first_due, apart=timedelta(0)):
    """So many events, the touches of which fall due one after the other."""
    begin = datetime.now(UTC) + first_due
    times = ((begin + number * apart).isoformat() for number in range(count))
    stack.post_events(*(cloud_event(str(uuid4()), "order.paid", uuid4().hex[:8], time=at) for at in times))


def firing_alert(alert, **labels):
    about = "".join(f', {name}="{value}"' for name, value in labels.items())
    return f'ALERTS{{alertname="{alert}", alertstate="firing"{about}}}'


@pytest.mark.campaign
def test_alerts_fire_when_core_is_killed_and_clear_after_restart(tmp_path):
    """The alerts' durations are shortened to a second. A worker is killed: nothing consumes, a queue grows, touches are
    overdue; what the next worker then delivers is late.
    """
    with ExitStack() as running:
        stack = running.enter_context(running_stack(programs=["web", "core", "ticks", "long", "beat"]))
        metrics_dir = {"AFTERTOUCH_METRICS_DIR": str(stack.state_dir / "metrics")}
        exporter = running.enter_context(metrics_server(metrics_dir, tmp_path))
        web = stack.base_url.removeprefix("http://")
        scraper = running.enter_context(prometheus(tmp_path / "prometheus", [web, exporter]))
        target = StackUnderTest(stack)
        target.apply_config(small_matrix(LOG, {"key": "now", "trigger": "order.paid"}))
        target.create_api_key("events")
        send_orders(target, 1, timedelta(0))
        for instance in (web, exporter):
            scraper.await_query(f'aftertouch_pass_last_timestamp_seconds{{instance="{instance}"}} > 0')
        scraper.await_query("rate(aftertouch_publish_total[1m]) > 0")
        scraper.await_query('sum by (kind) (aftertouch_processes{kind="beat"}) == 2')  # once at each address
        # What was never counted has no rate: the first touch is seen before the others come.
        scraper.await_query('count by (queue) (aftertouch_deliver_total{queue="touch.normal"})')
        scraper.await_query('sum(aftertouch_delivery_lateness_seconds_count{kind="log"}) > 0')
        assert not scraper.query('ALERTS{alertname=~"NoCoreWorker|SchedulerStalled|QueueGrowing|TouchesOverdue"}')

        for program in ("core", "ticks"):
            stack.kill(program)
            # A program that is not stopped would be started again.
            stack.stop(program)
        for _ in range(2):
            # Each a message of its own.
            send_orders(target, 500, timedelta(seconds=5), apart=timedelta(milliseconds=30))
        send_orders(target, 100, timedelta(minutes=-3))
        scraper.await_query(firing_alert("NoCoreWorker"))
        scraper.await_query(
            firing_alert("QueueWithoutConsumer", queue="ticks")
        )  # what beat goes on publishing piles up
        scraper.await_query(firing_alert("QueueGrowing", queue="touch.normal"))
        scraper.await_query(firing_alert("TouchesOverdue"))
        assert not scraper.query(firing_alert("LatenessHigh"))

        stack.start("core")
        stack.start("ticks")
        for alert in ("LatenessHigh", "LatenessVeryHigh"):
            scraper.await_query(firing_alert(alert))
        for alert in ("NoCoreWorker", "QueueGrowing", "TouchesOverdue"):
            scraper.await_query(f'absent(ALERTS{{alertname="{alert}"}})')
