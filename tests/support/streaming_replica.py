"""A hot standby of the embedded PostgreSQL, made with `pg_basebackup` and fed by streaming replication."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from inspect import getclosurevars
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from django.conf import settings
from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from config.environment import environment
from config.local.processes import PLAIN_ENVIRONMENT, wait_until
from config.local.servers import Postgres, binaries, server_account
from scheduling import replica
from tests.support.waiting import WAIT_LIMIT


class Standby(Postgres):
    """Shares the state folder and the passwords of its primary; its data are in a folder beside."""

    def __init__(self) -> None:
        super().__init__(environment().aftertouch_state_dir.resolve(), server_account())
        self.primary = Postgres(self.state_dir, self.account)
        self.folder = self.state_dir / "standby"
        self.log = self.state_dir / "logs" / "standby.log"
        self.port = 0

    def initialise(self) -> None:
        self.account.own(self.folder)
        process = self.primary.process()
        assert process is not None
        url = self.primary.admin_url(self.primary.port_of(process) or 0, "postgres")
        words = ["-D", str(self.data), "-d", url, "--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        made = subprocess.run(
            [*self.becoming, str(binaries() / "pg_basebackup"), *words],
            cwd="/", env=PLAIN_ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr

    def start(self) -> str:
        url = super().start()
        self.port = urlsplit(url).port or 0
        return url

    def ask(self, statement: str) -> Any:
        with psycopg.connect(self.admin_url(self.port), autocommit=True) as administrator:
            return administrator.execute(statement.encode()).fetchone()

    def pause(self) -> None:
        self.ask("SELECT pg_wal_replay_pause()")
        wait_until(lambda: self.ask("SELECT pg_get_wal_replay_pause_state()") == ("paused",), WAIT_LIMIT, 0.05)

    def resume(self) -> None:
        self.ask("SELECT pg_wal_replay_resume()")

    def promote(self) -> None:
        assert self.ask("SELECT pg_promote(true, 60)") == (True,)

    def await_all(self) -> None:
        """Wait until it has replayed all commits of the primary so far."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_current_wal_insert_lsn()::text")
            (position,) = cursor.fetchone()
        reached = f"SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn"
        assert wait_until(lambda: self.ask(reached) == (True,), WAIT_LIMIT, 0.05)


@contextmanager
def streaming_replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standby]:
    """Start a standby and set it up as the database `replica`, judged at each read."""
    if environment().database_url:
        pytest.skip("missing service: a replica of the embedded PostgreSQL")
    standby = Standby()
    shutil.rmtree(standby.folder, ignore_errors=True)
    monkeypatch.setattr(replica, "PROBE_EVERY", 0.0)
    monkeypatch.setattr(replica, "REST", 0.0)
    # A stalled machine does not make the replica unusable. The last commit may be old when other work moves the log.
    monkeypatch.setattr(replica, "PROBE_TIMEOUT", WAIT_LIMIT)
    monkeypatch.setattr(settings, "AFTERTOUCH_REPLICA_LAG_LIMIT", timedelta(minutes=10))
    monkeypatch.setattr(replica, "replica_watch", replica.ReplicaWatch())
    # Django's tests forbid databases that a test does not name, and it can only name those that exist before it.
    case = getclosurevars(BaseDatabaseWrapper.ensure_connection).nonlocals["cls"]
    monkeypatch.setattr(case, "databases", {*case.databases, replica.ALIAS})
    try:
        standby.start()
        connections.settings[replica.ALIAS] = {
            **connections.settings["default"], "PORT": str(standby.port), "NAME": connection.settings_dict["NAME"],
        }  # fmt: skip
        yield standby
    finally:
        if replica.ALIAS in connections.settings:
            connections[replica.ALIAS].close()
            del connections[replica.ALIAS]
            del connections.settings[replica.ALIAS]
        standby.stop()
        shutil.rmtree(standby.folder, ignore_errors=True)
