"""Brokers of our own on loopback: a Redis with its replica and three Sentinels, and a RabbitMQ node."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest
import redis
from kombu import Connection

from config.local.processes import select_port, wait_until
from config.local.servers import server_binary
from tests.support.waiting import WAIT_LIMIT

MASTER = "aftertouch"
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the plain script; the one on PATH becomes another user
RABBITMQCTL = RABBITMQ.with_name("rabbitmqctl")
#: A Valkey that writes its title overwrites its environment, and with it the mark by which `config.local.reaper` finds
#: what an interrupted run has left.
KEEPS_MARK = ("--set-proc-title", "no")


@dataclass
class Server:
    """One server process in a group of its own, started and killed as often as a test likes."""

    words: list[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                self.words, env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_LIMIT)

    @contextmanager
    def standing(self, answers: Callable[[], bool] = lambda: True) -> Iterator[Self]:
        """From the moment that it answers to the end of the block."""
        try:
            self.start()
            assert wait_until(answers, WAIT_LIMIT), self.log.read_text()
            yield self
        finally:
            self.kill()


@dataclass
class RedisServer(Server):
    port: int = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        super().start()
        assert wait_until(self.answers, WAIT_LIMIT), self.log.read_text()

    def answers(self) -> bool:
        try:
            with redis.Redis(port=self.port, socket_timeout=1, socket_connect_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


@contextmanager
def redis_server(folder: Path, *words: str) -> Iterator[RedisServer]:
    port = select_port()
    home = folder / f"redis-{port}"
    home.mkdir(parents=True)
    plain = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--save", "", "--appendonly", "no"]
    server = RedisServer([str(server_binary()), *plain, *KEEPS_MARK, *words], home / "log", port=port)
    with server.standing():
        yield server


@dataclass
class Sentinels:
    primary: RedisServer
    replica: RedisServer
    ports: list[int]

    @property
    def broker_url(self) -> str:
        return ";".join(f"sentinel://127.0.0.1:{port}/0" for port in self.ports)

    def primary_port(self) -> int:
        """Whom the Sentinels name; 0 where none answers."""
        for port in self.ports:
            try:
                with redis.Redis(port=port, socket_timeout=1, socket_connect_timeout=1) as sentinel:
                    return int(sentinel.sentinel_get_master_addr_by_name(MASTER)[1])
            except (redis.RedisError, TypeError):
                continue
        return 0

    def kill_primary(self) -> RedisServer:
        """Kill the server that the Sentinels name. Return it. On a machine that stalls it may be the second one."""
        named = 0

        def is_named() -> bool:
            nonlocal named
            named = self.primary_port()
            return named > 0

        assert wait_until(is_named, WAIT_LIMIT), "no Sentinel answers"
        killed = self.primary if self.primary.port == named else self.replica
        killed.kill()
        return killed

    def agree(self) -> bool:
        """Each knows the replica and the other two."""
        for port in self.ports:
            try:
                with redis.Redis(port=port, socket_timeout=1, socket_connect_timeout=1) as sentinel:
                    state = sentinel.sentinel_master(MASTER)
            except redis.RedisError:
                return False
            if state["num-other-sentinels"] < 2 or state["num-slaves"] < 1:
                return False
        return True


@contextmanager
def sentinels(folder: Path) -> Iterator[Sentinels]:
    with ExitStack() as stack:
        primary = stack.enter_context(redis_server(folder))
        replica = stack.enter_context(redis_server(folder, "--replicaof", "127.0.0.1", str(primary.port)))
        ports = [stack.enter_context(_sentinel(folder, primary.port)).port for _ in range(3)]
        made = Sentinels(primary, replica, ports)
        assert wait_until(made.agree, WAIT_LIMIT), "the Sentinels do not find each other"
        yield made


@contextmanager
def _sentinel(folder: Path, primary: int) -> Iterator[RedisServer]:
    port = select_port()
    home = folder / f"sentinel-{port}"
    home.mkdir(parents=True)
    (home / "sentinel.conf").write_text(
        f"port {port}\nbind 127.0.0.1\ndir {home}\nset-proc-title no\nsentinel monitor {MASTER} 127.0.0.1 {primary} 2\n"
        f"sentinel down-after-milliseconds {MASTER} 5000\nsentinel failover-timeout {MASTER} 10000\n"
        f"sentinel parallel-syncs {MASTER} 1\n"
    )
    server = RedisServer([str(server_binary()), str(home / "sentinel.conf"), "--sentinel"], home / "log", port=port)
    with server.standing():
        yield server


# --- RabbitMQ ---------------------------------------------------------------------------------------------------------


@dataclass
class RabbitNode(Server):
    port: int = 0

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def start(self) -> None:
        super().start()
        assert wait_until(self.answers, WAIT_LIMIT, pause=0.2), self.log.read_text()

    def answers(self) -> bool:
        try:
            with Connection(self.url, connect_timeout=10) as connection:
                connection.connect()
                return True
        except (OSError, *Connection(self.url).connection_errors):
            return False

    def control(self, *words: str) -> str:
        """As `rabbitmqctl` does it. Returns what it printed once it is done."""
        done = subprocess.run(
            [str(RABBITMQCTL), *words], env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=WAIT_LIMIT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def rabbitmq(folder: Path, *lines: str) -> Iterator[RabbitNode]:
    """A node with its own port mapper, cookie and data. `lines` are its configuration. Skip the test where none is
    installed.
    """
    if not RABBITMQ.exists() or shutil.which("epmd") is None:
        pytest.skip("missing service: RabbitMQ with epmd, the port mapper of Erlang (Debian: rabbitmq-server)")
    home = folder / "rabbitmq"
    home.mkdir(parents=True)
    (home / "rabbitmq.conf").write_text("\n".join([*lines, ""]))
    (home / "plugins").write_text("[].\n")
    mapper_port, distribution_port, port = select_port(), select_port(), select_port()
    env = {
        "HOME": str(home),
        "ERL_EPMD_PORT": str(mapper_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": "faults@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
        "RABBITMQ_LOG_BASE": str(home / "log"),
        "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq"),
        "RABBITMQ_CONF_ENV_FILE": str(home / "rabbitmq-env.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +sbwt none",
    }
    mapper = Server(["epmd", "-port", str(mapper_port), "-address", "127.0.0.1"], home / "epmd.log", env)
    node = RabbitNode([str(RABBITMQ)], home / "node.log", env, port=port)
    with mapper.standing(), node.standing():
        yield node
