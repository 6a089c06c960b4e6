"""Two watchers and a worker on real servers, struck at random points: each silence gives one message or one reason."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil
import psycopg
import pytest

from config.embedded.processes import wait_until
from config.environment import ROOT
from config.stack import RunningStack, running_stack
from sessions.policy_set import PolicySet
from sessions.reports import watchers
from sessions.server import Server
from sessions.store import Store
from tests.sessions.faults.chats import THRESHOLD, Chatter, Count, count

pytestmark = pytest.mark.faults

PATIENCE = 120.0
CONFIGURATION = {
    "version": 1,
    "channels": [{"key": "log", "kind": "log"}],
    "templates": [{"key": "guide", "content_type": "guide", "category": "service", "body": "hi {{ user.id }}"}],
    "stages": [{"key": "chat", "name": "Chat"}],
    "nodes": [
        {
            "key": "guide", "stage": "chat", "trigger": "session.silent", "delay": "0s", "template": "guide",
            "channel": "log",
            "guards": {"cap": "ignore", "dedupe": "ignore", "conversation": "ignore", "quiet_hours": "ignore"},
        }
    ],
    "harassment_rules": [],
    "silence_policies": [{"tag": "default", "threshold": f"{THRESHOLD:g}s"}],
}  # fmt: skip


class House:
    """The stack with its watcher, and a second watcher of our own."""

    def __init__(self, stack: RunningStack) -> None:
        self.stack = stack
        self.second = self.watcher()

    def watcher(self) -> subprocess.Popen[bytes]:
        with (self.stack.state_dir / "logs" / "second.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(ROOT / "manage.py"), "watch_sessions"],
                cwd=ROOT, env=self.stack.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def await_second(self) -> None:
        """It has made itself known since it was started."""
        store = Store(Server(self.stack.endpoints.redis_url), lambda: PolicySet({}))
        own = f":{self.second.pid}"
        assert wait_until(lambda: any(each.name.endswith(own) for each in watchers(store)), PATIENCE)
        store.server.client.close()

    def kill_a_watcher(self, chance: random.Random) -> None:
        if chance.random() < 0.5:
            self.second.kill()
            self.second.wait()
            self.second = self.watcher()
        else:
            self.stack.kill("watcher")

    def sql(self, statement: str, parameters: list[object]) -> list[tuple[object, ...]]:
        with psycopg.connect(self.stack.endpoints.database_url, autocommit=True) as connection:
            return connection.execute(statement, parameters).fetchall()

    def at_rest(self, prefix: str) -> bool:
        """Every touch is settled and no session is armed or in flight any more."""
        try:
            unsettled = self.sql(_UNSETTLED, [f"{prefix}%"])[0][0]
        except psycopg.OperationalError:
            return False
        server = Server(self.stack.endpoints.redis_url)
        left = server.ask(
            lambda pipe: [
                pipe.zcard(f"{{at:s{shard:02}}}:{name}") for shard in range(16) for name in ("due", "inflight")
            ]
        )
        server.client.close()
        return unsettled == 0 and sum(left) == 0


@pytest.fixture(scope="module")
def the_house() -> Iterator[House]:
    folder = Path(tempfile.mkdtemp(prefix="chats-"))
    folder.chmod(0o755)
    environment = {"DJANGO_SETTINGS_MODULE": "config.settings.test", "AFTERTOUCH_WORKER_CONCURRENCY": "2"}
    try:
        with running_stack(environment, programs=["core", "beat", "watcher"], state_dir=folder) as stack:
            file = folder / "chats.json"
            file.write_text(json.dumps(CONFIGURATION))
            stack.manage("apply_config", str(file))
            house = House(stack)
            yield house
            house.second.send_signal(signal.SIGTERM)
            house.second.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def chatting(
    house: House, name: str, *, rate: float = 20.0, keeps_pinging: bool = False
) -> Iterator[tuple[Chatter, random.Random]]:
    """Load for the length of the block, then the end of everything, then the count."""
    seed = int(os.environ.get("FAULTS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"{name}: seed {seed} (FAULTS_SEED={seed} repeats it)")
    chance = random.Random(seed)
    chatter = Chatter(house.stack.endpoints.redis_url, f"{uuid4().hex[:8]}-", rate, random.Random(seed + 1))
    chatter.keeps_pinging = keeps_pinging
    with chatter:
        yield chatter, chance
        chatter.hush()
    wait_until(lambda: house.at_rest(chatter.prefix), PATIENCE, pause=0.3)
    found: Count = count(house, chatter)
    print(found.line(name, seed))
    logs = "".join(path.read_text(errors="replace")[-3000:] for path in (house.stack.state_dir / "logs").glob("*.log"))
    assert not found.problems, "\n".join([*found.problems[:20], logs])
    assert found.sessions == len(chatter.chats) > 0


def test_watchers_killed_at_random_points(the_house: House) -> None:
    with chatting(the_house, "kill -9 watcher") as (_, chance):
        for _ in range(6):
            time.sleep(chance.uniform(0.3, 1.5))
            the_house.kill_a_watcher(chance)


@pytest.mark.campaign
def test_watchers_killed_at_twenty_random_points(the_house: House) -> None:
    with chatting(the_house, "kill -9 watcher, 20 points", rate=60) as (_, chance):
        for _ in range(20):
            time.sleep(chance.uniform(0.3, 3.0))
            the_house.kill_a_watcher(chance)


def test_postgresql_killed_and_then_out_of_reach(the_house: House) -> None:
    with chatting(the_house, "PostgreSQL down") as (_, chance):
        time.sleep(chance.uniform(1.0, 3.0))
        killed = the_house.stack.kill("PostgreSQL")
        assert wait_until(lambda: the_house.stack.server_pids.get("PostgreSQL", killed) != killed, PATIENCE)
        time.sleep(chance.uniform(1.0, 2.0))
        main = psutil.Process(the_house.stack.server_pids["PostgreSQL"])
        stopped = [main, *main.children(recursive=True)]
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            time.sleep(10)
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        time.sleep(2)


def test_valkey_killed(the_house: House) -> None:
    with chatting(the_house, "kill -9 Valkey") as (_, chance):
        time.sleep(chance.uniform(2.0, 4.0))
        killed = the_house.stack.kill("Valkey")
        assert wait_until(lambda: the_house.stack.server_pids.get("Valkey", killed) != killed, PATIENCE)
        time.sleep(3)


def test_everything_flushed_while_everybody_pings(the_house: House) -> None:
    """Who is there is armed again by the next ping. What had fallen silent and was not handed in yet is lost."""
    with chatting(the_house, "FLUSHALL", keeps_pinging=True) as (chatter, chance):
        time.sleep(chance.uniform(2.0, 4.0))
        server = Server(the_house.stack.endpoints.redis_url)
        server.client.flushall()
        server.client.script_flush()
        server.client.close()
        time.sleep(2)
        assert len(chatter.chats) > 20


def test_a_watcher_that_is_stopped_leaves_the_rest_to_the_other(the_house: House) -> None:
    with chatting(the_house, "SIGTERM watcher"):
        for _ in range(3):
            the_house.await_second()
            time.sleep(0.5)
            the_house.second.send_signal(signal.SIGTERM)
            assert the_house.second.wait(30) == 0
            time.sleep(0.5)
            the_house.second = the_house.watcher()


_UNSETTLED = """
SELECT count(*) FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id
WHERE e.event_id LIKE %s AND t.state IN ('scheduled', 'queued', 'running')
"""
