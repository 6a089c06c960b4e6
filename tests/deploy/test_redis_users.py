"""Every program as its own Redis user: all of it works, and the server has denied nothing."""

import base64
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import redis
import yaml

from config.environment import ROOT
from config.local.processes import select_port, wait_until
from config.local.servers import server_binary
from scheduling.monitoring.queues import WORKER_REPORTS
from tests.faults.brokers import KEEPS_MARK, Server
from tests.faults.workers import celery, worker
from tests.support.small_matrix import LOG, LOOK, ONE_SHOP, small_matrix
from tests.support.stack import StackUnderTest, cloud_event, run_stack
from tests.support.waiting import WAIT_LIMIT

USERS = ROOT / "deploy" / "redis" / "users.acl"
SECRET = "s3cret"
CONFIG = small_matrix(
    LOG,
    {"key": "now", "trigger": "order.paid"},
    {"key": "silent", "trigger": "session.silent", "channel": "inapp"},
    channels=[LOG, {"key": "inapp", "kind": "inapp"}],
    silence_policies=[{"tag": "default", "threshold": "2s", "jitter": "0s"}],
    **ONE_SHOP,
)

# Beat asks workers, chats and a robot's quota before it sends what is due.
ON_DUTY = """
from datetime import timedelta
from django.utils.timezone import now
from scheduling.models import Alert, AlertReceiver, ChannelConfig, Community, FailedTask
channel = ChannelConfig.objects.create(key="ops", kind="wecom")
place = Community.objects.create(chat_id="ops", targets={"ops": {"url": "http://127.0.0.1:1/"}})
AlertReceiver.objects.create(channel=channel, community=place)
old = now() - timedelta(hours=2)
FailedTask.objects.create(origin="touch", failure="failed", reason="x", failed_at=old)
Alert.objects.create(condition="failed", subject="touch", since=old, value=1, message_at=old, tried=True)
"""


class AclRedis:
    """A Redis that knows only the users of the file."""

    def __init__(self, folder):
        self.port = select_port()
        acl = folder / "users.acl"
        lines = [line for line in USERS.read_text().splitlines() if line.startswith("user ")]
        acl.write_text("\n".join(lines).replace("PASSWORD", SECRET) + "\n")
        program = shutil.which("redis-server") or str(server_binary())
        words = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self.server = Server([*words, *KEEPS_MARK, "--aclfile", str(acl)], folder / "redis.log")

    def url(self, user):
        return f"redis://{user}:{SECRET}@127.0.0.1:{self.port}/0"

    def denied(self):
        with redis.Redis.from_url(self.url("admin")) as client:
            return [
                {name: row[name] for name in ("username", "reason", "context", "object")} for row in client.acl_log()
            ]

    def answers(self):
        try:
            with redis.Redis.from_url(self.url("admin"), socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


@pytest.fixture(scope="module")
def acl_redis():
    with tempfile.TemporaryDirectory(prefix="acl-", ignore_cleanup_errors=True) as name:
        made = AclRedis(Path(name))
        with made.server.standing(made.answers):
            yield made


@contextmanager
def _composed_redis(folder, password):
    """Redis as the composed service starts it. PATH has the server only: the script can run no other command."""
    (folder / "bin").mkdir()
    (folder / "bin" / "redis-server").symlink_to(shutil.which("redis-server") or server_binary())
    service = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["redis"]
    script = str(USERS.with_name("with_users.sh"))
    words = [script if word == "/etc/aftertouch/with_users.sh" else word for word in service["command"]]
    port = select_port()
    env = {"PATH": str(folder / "bin"), "TMPDIR": str(folder), "REDISCLI_AUTH": password}
    server = Server(["/bin/sh", *words[1:], "--port", str(port), "--dir", str(folder)], folder / "redis.log", env)

    def answers():
        try:
            with redis.Redis(port=port, username="web", password=password, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    with server.standing(answers):
        assert server.process
        for process in (parent := psutil.Process(server.process.pid), *parent.children(recursive=True)):
            assert password not in " ".join(process.cmdline())
        yield port


def test_composed_redis_loads_users_and_hides_password(tmp_path):
    password = "0a1b2c3d" * 4
    with _composed_redis(tmp_path, password) as port:
        assert (tmp_path / "users.acl").stat().st_mode & 0o077 == 0
        web = redis.Redis(port=port, username="web", password=password)
        with web, pytest.raises(redis.exceptions.NoPermissionError):
            web.execute_command("FLUSHALL")
        with redis.Redis(port=port, username="admin", password=password) as admin:
            assert set(admin.acl_users()) == {
                line.split()[1] for line in USERS.read_text().splitlines() if line.startswith("user ")
            }
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


@pytest.mark.parametrize("password", ["", "two words", "a@b", "a>b"])
def test_composed_redis_with_unfit_password_refuses_start(password, tmp_path):
    words = ["/bin/sh", str(USERS.with_name("with_users.sh")), "/bin/true"]
    env = {"TMPDIR": str(tmp_path), "REDISCLI_AUTH": password}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=WAIT_LIMIT)
    assert done.returncode != 0
    assert "REDISCLI_AUTH" in done.stderr
    assert not (tmp_path / "users.acl").exists()


@pytest.mark.campaign
def test_programs_work_with_own_redis_users_without_denials(acl_redis, state_folder):
    with redis.Redis.from_url(acl_redis.url("admin")) as client:
        client.acl_log_reset()  # other tests were denied what they tried
    with ExitStack() as running:
        env = {"REDIS_URL": acl_redis.url("web"), "AFTERTOUCH_ALLOWED_PRIVATE_HOSTS": "127.0.0.1"}
        stack = running.enter_context(run_stack(state_folder("acl-stack"), ["web"], env))

        def as_user(user):
            login = {"REDIS_URL": acl_redis.url(user), "FLOWER_BASIC_AUTH": "ops:ops"}
            return {**stack.environment, "AFTERTOUCH_STATE_DIR": str(stack.state_dir), **login}

        target = StackUnderTest(stack)
        target.apply_config(CONFIG)
        stack.manage("shell", "-c", ON_DUTY)
        core = "ticks,long,touch.high,touch.normal,touch.low"
        workers = [
            running.enter_context(worker(as_user("core"), "-Q", core, "-c", "2", "-n", "core@%h", log="core")),
            running.enter_context(worker(as_user("execution"), "-Q", "high,normal,low", "-c", "1", log="execution")),
        ]
        running.enter_context(celery(as_user("beat"), "beat", log="beat"))
        words = [sys.executable, str(ROOT / "manage.py"), "watch_sessions"]
        watcher = Server(words, stack.state_dir / "logs" / "watcher.log", as_user("watcher"))
        running.enter_context(watcher.standing())
        port = str(select_port())
        running.enter_context(
            celery(as_user("flower"), "flower", "--address=127.0.0.1", f"--port={port}", log="flower")
        )
        for each in workers:
            each.await_ready()

        _check_touch_silence_and_job(target)
        assert wait_until(lambda: "core@" in _flower(port), WAIT_LIMIT, 0.5), "Flower sees no worker"
        assert acl_redis.denied() == []


def _check_touch_silence_and_job(target):
    target.create_api_key("events", "sessions", "rpa")
    target.post_events(cloud_event("1", "order.paid", "ann"))
    frame = {"user_id": "bob", "chat_id": "c1", "from": "user", "kind": "message"}
    target.call("POST", "/api/v1/sessions/c1/activity", frame)
    target.call("POST", "/api/v1/rpa/jobs", LOOK)
    ends = {
        "a touch": "SELECT EXISTS (SELECT FROM scheduling_touch t JOIN scheduling_event e ON e.id = t.event_id"
        " WHERE e.type = 'order.paid' AND t.state = 'delivered')",
        "a silence": "SELECT EXISTS (SELECT FROM scheduling_touch t JOIN scheduling_event e ON e.id = t.event_id"
        " WHERE e.type = 'session.silent' AND t.state = 'delivered')",
        "a job": "SELECT EXISTS (SELECT FROM rpa_tasks_job WHERE state = 'succeeded')",
        "an alert": "SELECT EXISTS (SELECT FROM scheduling_alertreceiver WHERE problem LIKE 'connect%%')",
    }
    for what, statement in ends.items():
        target.wait(lambda statement=statement: target.sql(statement) == [(True,)], f"{what} ends")


def _flower(port):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/workers?json=1")
    request.add_header("Authorization", "Basic " + base64.b64encode(b"ops:ops").decode())
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@pytest.mark.parametrize("user", ["web", "core", "execution", "watcher", "beat", "flower"])
def test_redis_user_lacks_dangerous_commands(user, acl_redis):
    with redis.Redis.from_url(acl_redis.url(user)) as client:
        for words in (
            "FLUSHALL",
            "KEYS *",
            "SCAN 0",
            "RANDOMKEY",
            "CONFIG GET *",
            "SHUTDOWN NOSAVE",
            "ACL LIST",
            "SET other:key 1",
            "MONITOR",
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words.split())


def test_execution_user_reports_and_reaches_no_other_key(acl_redis):
    with redis.Redis.from_url(acl_redis.url("execution")) as client:
        client.hset(WORKER_REPORTS, "execution@a high", "{}")
        client.hdel(WORKER_REPORTS, "execution@a high")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get("at:complaints")


def test_redis_without_login_refuses_client(acl_redis):
    with redis.Redis(port=acl_redis.port) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
