"""The images built and the composed services started by Docker, from a copy of what is tracked: an event becomes a
delivered touch, a job runs with a browser, and each container serves its own figures."""

import base64
import functools
import json
import os
import resource
import secrets
import shutil
import subprocess
import urllib.request

import pytest
import yaml

from config.environment import ROOT
from config.local.processes import select_port, wait_until
from tests.support.small_matrix import LOG, small_matrix
from tests.support.waiting import WAIT_LIMIT

TOKENS = ("POSTGRES_PASSWORD", "REDIS_PASSWORD")
PRIVATE = "10.0.0.0/8,172.16.0.0/12,192.168.0.0/16"  #: where Docker's networks lie
FIGURES = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:9102/metrics", timeout=10).read().decode())
"""
CONFIG = small_matrix(
    LOG, {"key": "now", "trigger": "signup.succeeded"},
    **yaml.safe_load((ROOT / "examples" / "demo_shop" / "shops.yaml").read_text()),
)  # fmt: skip


def missing_docker():
    """What of Docker there is not; empty where it can be asked to compose."""
    if not shutil.which("docker"):
        return "docker"
    asked = [["docker", "version"], ["docker", "compose", "version"]]
    return next((" ".join(each) for each in asked if subprocess.run(each, capture_output=True).returncode), "")


class Composed:
    def __init__(self, folder):
        self.folder, self.port = folder, select_port()
        self.name = f"aftertouch-{secrets.token_hex(4)}"
        self.env = {
            **os.environ, "AFTERTOUCH_PORT": str(self.port), "AFTERTOUCH_FLOWER_PORT": str(select_port()),
            "AFTERTOUCH_TRUSTED_PROXIES": PRIVATE, "FLOWER_BASIC_AUTH": f"ops:{secrets.token_hex(16)}",
            **{name: secrets.token_hex(16) for name in TOKENS},
        }  # fmt: skip
        self.key = ""
        self._copy()

    def _copy(self):
        """A checkout with the example environment and names that no other project uses."""
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, tracked.stdout.split("\0")):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.folder / name)
        example = (self.folder / "deploy" / "systemd" / "environment.example").read_text()
        secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
        keys = "".join(f"{name}={secret}\n" for name in ("DJANGO_SECRET_KEY", "AFTERTOUCH_SECRETS_KEYS"))
        (self.folder / "deploy" / "environment").write_text(example)
        (self.folder / "deploy" / "keys.environment").write_text(keys)
        services = yaml.safe_load((self.folder / "deploy" / "compose.yaml").read_text())["services"]
        here = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        trial = {
            name: {
                "image": f"{self.name}-{service['build']['target']}",
                "ulimits": {"nofile": min(here, service["ulimits"]["nofile"])},
            }
            for name, service in services.items()
            if "build" in service
        }
        (self.folder / "deploy" / "trial.yaml").write_text(json.dumps({"services": trial}))

    def __call__(self, *words, within=WAIT_LIMIT):
        command = ["docker", "compose", "-p", self.name, "-f", "compose.yaml", "-f", "trial.yaml", *words]
        done = subprocess.run(
            command, cwd=self.folder / "deploy", env=self.env, capture_output=True, text=True, timeout=within
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def manage(self, *words):
        return self("exec", "-T", "core", "python", "manage.py", *words)

    def call(self, path, body=None):
        """As the proxy hands it on."""
        headers = {"Host": "aftertouch.example.com", "X-Forwarded-Proto": "https", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            None if body is None else json.dumps(body).encode(),
            {**headers, "Authorization": f"Bearer {self.key}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def running(self):
        return set(self("ps", "--services", "--status", "running").split())


@pytest.fixture
def composed(tmp_path):
    if gap := missing_docker():
        pytest.skip(f"missing service: {gap}")
    composed = Composed(tmp_path)
    try:
        composed("build", within=1800)
        composed("up", "-d", within=2 * WAIT_LIMIT)
        yield composed
    finally:
        composed("down", "-v", "--rmi", "local", "--timeout", "20")


@pytest.mark.campaign
def test_compose_services_deliver_touch_and_run_job(composed):
    everything = {*composed("config", "--services").split()} - {"migrate"}
    assert wait_until(lambda: composed.running() == everything, WAIT_LIMIT), composed("ps", "-a")

    (composed.folder / "configuration.yaml").write_text(json.dumps(CONFIG))
    composed("cp", "../configuration.yaml", "core:/var/lib/aftertouch/configuration.yaml")
    composed.manage("apply_config", "/var/lib/aftertouch/configuration.yaml")
    scopes = ("--scope", "events", "--scope", "touches", "--scope", "rpa")
    composed.key = composed.manage("create_api_key", "trial", *scopes).split()[-1]
    assert wait_until(lambda: composed.call("health/ready"), WAIT_LIMIT)
    _deliver(composed)
    _synchronise(composed)
    for service in ("web", "core", "ticks", "long", "execution", "beat", "watcher"):
        figures = composed("exec", "-T", service, "python", "-c", FIGURES)
        assert "aftertouch_build_info{" in figures, service
    assert "metric_not_recorded" not in composed("logs", "--no-color")
    assert composed.running() == everything


def _deliver(composed):
    event = {"specversion": "1.0", "id": "1", "source": "/trial", "type": "signup.succeeded", "subject": "ann"}
    (task_id,) = composed.call("api/v1/events", {**event, "data": {"chat_id": "c1"}})["touches"]
    _await_state(functools.partial(composed.call, f"api/v1/touches/{task_id}"), "delivered", composed, "core")


def _synchronise(composed):
    composed("exec", "-T", "-d", "execution", "python", "-m", "examples.demo_shop")
    payload = {"site": "http://127.0.0.1:8765", "login": True}
    job = {"platform": "demo", "shop_id": "s1", "task_type": "sync_order", "payload": payload}
    task_id = composed.call("api/v1/rpa/jobs", job)["task_id"]
    _await_state(functools.partial(composed.call, f"api/v1/rpa/jobs/{task_id}"), "succeeded", composed, "execution")


def _await_state(look, state, composed, service):
    ended = wait_until(lambda: look()["state"] == state, WAIT_LIMIT, 1)
    assert ended, f"{look()} {composed('logs', '--no-color', service)[-3000:]}"
