"""A stack for chats, with watchers, web nodes and a worker of our own beside it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import redis
from redis.crc import key_slot

from config.environment import ROOT
from config.local.processes import select_port, wait_until
from config.local.stack import select_programs
from sessions.policy import Policy, PolicySet
from sessions.store import client
from sessions.store.client import Server, StoreUnavailable
from sessions.store.sessions import Store
from sessions.store.stats import running_watchers
from tests.faults.brokers import RedisServer, Sentinels
from tests.sessions.redis_cluster import ClusterUnderTest
from tests.support.small_matrix import LOG, small_matrix
from tests.support.stack import StackUnderTest, run_stack
from tests.support.waiting import WAIT_LIMIT

THRESHOLD = 2.0  #: seconds, of the policy
#: As configured: product and tests store them again on a flushed server.
POLICIES = PolicySet({"default": Policy(timedelta(seconds=THRESHOLD))})


def configuration(channel: str) -> dict[str, Any]:
    """One guide message for each silence, by the channel `log` or `inapp`."""
    retry = ["1s", "1s", "2s", "2s", "4s", "4s", "8s", "8s", "8s", "8s"]
    return small_matrix(
        LOG, {"key": "guide", "trigger": "session.silent", "channel": channel},
        channels=[LOG, {"key": "inapp", "kind": "inapp", "retry": retry}],
        silence_policies=[{"tag": "default", "threshold": f"{THRESHOLD:g}s"}],
    )  # fmt: skip


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
        return self.process.wait(WAIT_LIMIT)


@dataclass
class ChatStack(StackUnderTest):
    stores: Sentinels | ClusterUnderTest | None = None  #: of the live chats, beside the server of the stack

    wait_limit = WAIT_LIMIT

    def kill_store(self) -> None:
        """Kill the server of the live chats, or a primary of them. Return when another one has its place."""
        match self.stores:
            case Sentinels() as watched:
                killed = watched.kill_primary()
                self.wait(lambda: watched.primary_port() not in (0, killed.port), "another primary is named")
                killed.start()
                self.wait(lambda: is_replica(killed), "the killed server is back as a replica")
            case ClusterUnderTest() as cluster:
                slot = key_slot(client.SHARD[0].encode())
                killed = cluster.owner_of(slot)
                cluster.kill(killed)
                self.wait(lambda: cluster.owner_of(slot, besides=killed) is not killed, "a replica takes over")
                cluster.restart(killed)
                self.wait(cluster.agrees, "the killed node is back as a replica")
            case None:
                pid = self.stack.kill("Valkey")
                self.wait(lambda: self.stack.server_pids.get("Valkey", pid) != pid, "Valkey runs again")

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

    @property
    def chats_url(self) -> str:
        """The Redis of live chats."""
        return self.stack.environment.get("AFTERTOUCH_SESSIONS_REDIS_URL") or self.stack.endpoints.redis_url

    def store(self) -> Store:
        return Store(Server(self.chats_url), lambda: POLICIES)

    def send_by(self, channel: str) -> None:
        self.apply_config(configuration(channel))

    def at_rest(self, prefix: str) -> bool:
        """Every touch is settled and no session is armed or in flight any more."""
        return self.restless(prefix) == "nothing"

    def restless(self, prefix: str) -> str:
        """Name what is not settled. The store is read first: a silence leaves it after its touch is stored."""
        store = self.store()
        try:
            shards = store.shards()
            unsettled = self.sql(_UNSETTLED, [f"{prefix}%"])
        except (psycopg.OperationalError, StoreUnavailable) as error:
            return str(error)
        finally:
            store.server.client.close()
        armed, in_flight = sum(each.armed for each in shards), sum(each.in_flight for each in shards)
        return f"{armed} armed, {in_flight} in flight, {unsettled}" if armed or in_flight or unsettled else "nothing"

    def await_rest(self, prefix: str) -> None:
        if not wait_until(lambda: self.at_rest(prefix), WAIT_LIMIT, pause=0.3):
            raise AssertionError(f"after {WAIT_LIMIT:g} s there is still {self.restless(prefix)}\n{self.logs()}")


def is_replica(server: RedisServer) -> bool:
    """Return whether the server follows its primary."""
    with redis.Redis(port=server.port, socket_timeout=5) as connection:
        state = connection.info("replication")
    return bool(state["role"] == "slave" and state["master_link_status"] == "up")


@contextmanager
def run_chat_stack(folder: Path, stores: Sentinels | ClusterUnderTest | None = None) -> Iterator[ChatStack]:
    with run_stack(folder, ["core", "ticks", "beat", "watcher"], _addresses(stores)) as stack:
        made = ChatStack(stack, stores)
        made.send_by("log")
        yield made


def _addresses(stores: Sentinels | ClusterUnderTest | None) -> dict[str, str]:
    match stores:
        case Sentinels():
            return {"REDIS_URL": stores.broker_url, "CELERY_BROKER_URL": stores.broker_url}
        case ClusterUnderTest():
            return {"AFTERTOUCH_SESSIONS_REDIS_URL": stores.url}
        case None:
            return {}


def _program_words(program: str, **values: object) -> str:
    """As the stack starts it."""
    return select_programs([program])[0].words.format(**values)


_UNSETTLED = """
SELECT t.state, t.reason, t.attempt, count(*), min(t.due_at), min(t.lease_until)
FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id
WHERE e.event_id LIKE %s AND t.state IN ('scheduled', 'queued', 'running') GROUP BY 1, 2, 3
"""
