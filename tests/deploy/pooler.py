"""PgBouncer with the shipped configuration in front of one database."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg.rows import dict_row

from config.environment import ROOT
from config.local.processes import select_port
from config.local.servers import server_account
from tests.faults.brokers import Server

SHIPPED = ROOT / "deploy" / "pgbouncer" / "pgbouncer.ini"
PROGRAM = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")
# A machine that stalls for seconds is not an unavailable server.
PATIENT = "query_wait_timeout = 60\nserver_connect_timeout = 60\n"


class PgBouncer:
    """Its clients call the database `aftertouch`. Lines that follow come last and so hold."""

    def __init__(self, folder: Path, database: str, mode: str, lines: str) -> None:
        self.direct, port, account = urlsplit(database), select_port(), server_account()
        name = self.direct.path.lstrip("/")
        text = SHIPPED.read_text()
        for usual, here in (
            (r"^aftertouch = .*", f"aftertouch = host={self.direct.hostname} port={self.direct.port} dbname={name}"),
            (r"^listen_port = .*", f"listen_port = {port}"),
            (r"^pool_mode = .*", f"pool_mode = {mode}"),
            (r"/etc/pgbouncer", str(folder)),
        ):
            text, found = re.subn(usual, here, text, flags=re.MULTILINE)
            assert found, usual
        text += f"unix_socket_dir =\nadmin_users = {self.direct.username}\n{PATIENT}{lines}\n"
        (folder / "pgbouncer.ini").write_text(text)
        (folder / "userlist.txt").write_text(f'"{self.direct.username}" "{self.direct.password}"\n')
        account.own(folder)
        words = [*account.becoming(folder), str(PROGRAM), str(folder / "pgbouncer.ini")]
        self.server = Server(words, folder / "log")
        self.url = f"postgresql://{self.direct.username}:{self.direct.password}@127.0.0.1:{port}/aftertouch"

    def answers(self) -> bool:
        try:
            return bool(self.ask("SELECT 1"))
        except psycopg.OperationalError:
            return False

    def connection(self, database: str = "aftertouch") -> psycopg.Connection[dict[str, Any]]:
        return psycopg.connect(
            self.url, dbname=database, autocommit=True, cursor_factory=psycopg.ClientCursor[dict[str, Any]],
            row_factory=dict_row,
        )  # fmt: skip

    def ask(self, statement: str, database: str = "aftertouch") -> list[dict[str, Any]]:
        with self.connection(database) as connection:
            return connection.execute(statement.encode()).fetchall()

    def clients(self) -> int:
        return sum(row["database"] == "aftertouch" for row in self.ask("SHOW CLIENTS", "pgbouncer"))

    def servers(self) -> list[int]:
        """What PostgreSQL calls them."""
        return [row["remote_pid"] for row in self.ask("SHOW SERVERS", "pgbouncer") if row["database"] == "aftertouch"]


@contextmanager
def run_pgbouncer(database: str, mode: str, lines: str = "") -> Iterator[PgBouncer]:
    with tempfile.TemporaryDirectory(prefix="pgbouncer-", ignore_cleanup_errors=True) as name:
        made = PgBouncer(Path(name), database, mode, lines)
        with made.server.standing(made.answers):
            yield made
