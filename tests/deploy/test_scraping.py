"""The documented scrape targets are served by the documented programs."""

import re
import shlex
import sys
from functools import partial
from uuid import uuid4

import pytest
import requests
import yaml

from config.environment import ROOT, Environment, environment
from config.local.processes import wait_until
from scheduling.metrics import versions
from tests.deploy.test_systemd import Unit, read_example
from tests.faults.brokers import Server
from tests.scheduling.api.serving import database_url
from tests.support.waiting import WAIT_LIMIT

OF_THE_HOUSE = ("aftertouch_touches_oldest_overdue_seconds ", 'celery_queue_length{queue_name="touch.high"} 0.0\n')
PAGE = ROOT / "docs" / "reference" / "metrics.md"


def documented_targets():
    """Return the documented scrape targets."""
    (block,) = re.findall(r"^```yaml\n(scrape_configs:.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (job,) = yaml.safe_load(block)["scrape_configs"]
    assert set(job) == {"job_name", "static_configs"}, "with a path or a scheme of its own, ask as it says"
    return [target for each in job["static_configs"] for target in each["targets"]]


def read_series(address, host):
    """Return what the target exports; None while it does not answer."""
    try:
        told = requests.get(f"http://{address}/metrics", headers={"Host": host}, timeout=WAIT_LIMIT)
    except (requests.ConnectionError, requests.Timeout):
        return None
    assert told.status_code == 200
    return told.text


def has_series(address, host, *series):
    """Return whether the target exports lines with these starts. On a slow machine a source may be missing once."""
    text = read_series(address, host)
    return text is not None and all(f"\n{each}" in text for each in series)


@pytest.mark.django_db(transaction=True)
def test_metrics_unit_serves_listed_targets_and_the_watcher_of_its_node(tmp_path, valkey):
    """On an address of this machine that nothing else listens on, as it would on one that others reach."""
    one, two, three = uuid4().bytes[:3]
    here = f"127.{one}.{two}.{three % 254 + 1}"
    words = shlex.split(Unit("aftertouch-metrics.service")["Service"]["ExecStart"].split(maxsplit=1)[1])
    env = {
        **read_example(), "AFTERTOUCH_METRICS_ADDRESS": here, "AFTERTOUCH_METRICS_CLUSTER": "true",
        "AFTERTOUCH_METRICS_DIR": str(tmp_path / "metrics"), "AFTERTOUCH_STATE_DIR": str(tmp_path),
        "DJANGO_SETTINGS_MODULE": "config.settings.local", "DATABASE_URL": database_url(),
        "REDIS_URL": environment().redis,
    }  # fmt: skip
    exporter = Server([sys.executable, str(ROOT / words[0]), *words[1:]], tmp_path / "unit.log", env)
    watcher = Server([sys.executable, str(ROOT / "manage.py"), "watch_sessions"], tmp_path / "watcher.log", env)
    with exporter.standing():
        for target in documented_targets():
            address = f"{here}:{target.rpartition(':')[2]}"
            tells = partial(has_series, address, target, *OF_THE_HOUSE)
            assert wait_until(tells, WAIT_LIMIT, pause=0.2), exporter.log.read_text()

        ours, python, django, celery = versions()
        build = f'aftertouch_build_info{{celery="{celery}",django="{django}",python="{python}",version="{ours}"}}'
        of_watcher = ('aftertouch_processes{kind="watcher"} 1.0\n', build, "aftertouch_watchers 1.0\n")
        with watcher.standing():
            counted = wait_until(lambda: has_series(address, target, *of_watcher), WAIT_LIMIT, pause=0.2)
            assert counted, watcher.log.read_text()

        def forgets_the_watcher():
            text = read_series(address, target) or ""
            return OF_THE_HOUSE[0] in text and build not in text and 'watcher"}' not in text

        assert wait_until(forgets_the_watcher, WAIT_LIMIT, pause=0.2), read_series(address, target)


def test_example_environment_serves_metrics_on_loopback():
    assert (
        read_example()["AFTERTOUCH_METRICS_ADDRESS"] == Environment.model_fields["aftertouch_metrics_address"].default
    )
    assert read_example()["AFTERTOUCH_METRICS_ADDRESS"] == "127.0.0.1"
