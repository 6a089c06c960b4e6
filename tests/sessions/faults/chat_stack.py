"""A stack for chats, with watchers, web nodes and a worker of our own beside it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from config.environment import ROOT
from config.local.isolated import RunningStack, running_stack
from config.local.processes import select_port, wait_until
from config.local.programs import select_programs
from sessions.policy import Policy, PolicySet
from sessions.store.client import Server, StoreUnavailable
from sessions.store.sessions import Store
from sessions.store.stats import running_watchers

WAIT_LIMIT = 120.0
THRESHOLD = 2.0  #: seconds, of the policy
#: As the configuration says it: whoever meets a server that was flushed brings them back, whether product or test.
POLICIES = PolicySet({"default": Policy(timedelta(seconds=THRESHOLD))})
FREE = {"cap": "ignore", "dedupe": "ignore", "conversation": "ignore", "quiet_hours": "ignore"}


def configuration(channel: str) -> dict[str, Any]:
    """One guide message for each silence, by the channel `log` or `inapp`."""
    retry = ["1s", "1s", "2s", "2s", "4s", "4s", "8s", "8s", "8s", "8s"]
    return {
        "version": 1,
        "channels": [{"key": "log", "kind": "log"}, {"key": "inapp", "kind": "inapp", "retry": retry}],
        "templates": [{"key": "guide", "content_type": "guide", "category": "service", "body": "hi {{ user.id }}"}],
        "stages": [{"key": "chat", "name": "Chat"}],
        "nodes": [
            {
                "key": "guide", "stage": "chat", "trigger": "session.silent", "delay": "0s", "template": "guide",
                "channel": channel, "guards": FREE,
            }
        ],
        "harassment_rules": [],
        "silence_policies": [{"tag": "default", "threshold": f"{THRESHOLD:g}s"}],
    }  # fmt: skip


@dataclass
class Program:
    """A program of ours on the servers of the stack."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    address: str = ""  #: of a web node

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """Ask it to end, and wait. The exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@dataclass
class ChatStack:
    stack: RunningStack

    def start(self, name: str, words: list[str], clock: Path | None = None, address: str = "") -> Program:
        """`clock`: the file by which its clock goes."""
        if clock:
            words = ["-m", "tests.sessions.faults.shifted_clock", str(clock), *words]
        log = self.stack.state_dir / "logs" / f"ours-{name}-{uuid4().hex[:4]}.log"
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT, env=self.stack.environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
            )  # fmt: skip
        return Program(name, process, log, address)

    @contextmanager
    def running(self, *programs: Program) -> Iterator[None]:
        """Until the end of the block; then they end."""
        try:
            yield
        finally:
            for program in programs:
                if program.is_alive:
                    program.process.terminate()
            for program in programs:
                try:
                    program.process.wait(30)
                except subprocess.TimeoutExpired:
                    program.kill()

    def watcher(self, clock: Path | None = None) -> Program:
        return self.start("watcher", ["manage.py", "watch_sessions"], clock)

    def worker(self, clock: Path | None = None) -> Program:
        words = _program_words("core", worker_concurrency=2).replace("core@%h", f"core-{uuid4().hex[:4]}@%h")
        return self.start("worker", words.split(), clock)

    def web(self, name: str, clock: Path | None = None, *, port: int = 0) -> Program:
        port = port or select_port()
        words = _program_words("web", host="127.0.0.1", port=port, web_workers=1)
        return self.start(name, words.split(), clock, f"127.0.0.1:{port}")

    def await_watcher(self, program: Program) -> None:
        """It has made itself known since it was started."""
        own = f":{program.process.pid}"
        store = self.store()
        self.wait(lambda: any(each.name.endswith(own) for each in running_watchers(store)), "the watcher is there")
        store.server.client.close()

    def store(self) -> Store:
        return Store(Server(self.stack.endpoints.redis_url), lambda: POLICIES)

    def send_by(self, channel: str) -> None:
        file = self.stack.state_dir / "chats.json"
        file.write_text(json.dumps(configuration(channel)))
        self.stack.manage("apply_config", str(file))

    def sql(self, statement: str, parameters: list[object]) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.stack.endpoints.database_url, autocommit=True) as connection:
            return connection.execute(statement, parameters).fetchall()

    def at_rest(self, prefix: str) -> bool:
        """Every touch is settled and no session is armed or in flight any more."""
        return self.restless(prefix) == "nothing"

    def restless(self, prefix: str) -> str:
        store = self.store()
        try:
            unsettled = self.sql(_UNSETTLED, [f"{prefix}%"])
            shards = store.shards()
        except (psycopg.OperationalError, StoreUnavailable) as error:
            return str(error)
        finally:
            store.server.client.close()
        armed, in_flight = sum(each.armed for each in shards), sum(each.in_flight for each in shards)
        return f"{armed} armed, {in_flight} in flight, {unsettled}" if armed or in_flight or unsettled else "nothing"

    def await_rest(self, prefix: str) -> None:
        if not wait_until(lambda: self.at_rest(prefix), WAIT_LIMIT, pause=0.3):
            raise AssertionError(f"after {WAIT_LIMIT:g} s there is still {self.restless(prefix)}\n{self.logs()}")

    def wait(self, happened: Any, what: str, timeout: float = WAIT_LIMIT) -> None:
        if not wait_until(happened, timeout):
            raise AssertionError(f"not within {timeout:g} s: {what}\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted((self.stack.state_dir / "logs").glob("*.log"))
        )


@contextmanager
def run_chat_stack(folder: Path, env: Mapping[str, str] | None = None) -> Iterator[ChatStack]:
    environment = {
        "DJANGO_SETTINGS_MODULE": "config.settings.test",
        "AFTERTOUCH_WORKER_CONCURRENCY": "2",
        **(env or {}),
    }
    with running_stack(environment, programs=["core", "ticks", "beat", "watcher"], state_dir=folder) as stack:
        made = ChatStack(stack)
        made.send_by("log")
        yield made


def _program_words(program: str, **values: object) -> str:
    """As the stack starts it."""
    return select_programs([program])[0].words.format(**values)


def seed_of_this_run() -> int:
    return int(os.environ.get("FAULTS_SEED") or random.SystemRandom().randrange(2**32))


_UNSETTLED = """
SELECT t.state, t.reason, t.attempt, count(*), min(t.due_at), min(t.lease_until)
FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id
WHERE e.event_id LIKE %s AND t.state IN ('scheduled', 'queued', 'running') GROUP BY 1, 2, 3
"""
