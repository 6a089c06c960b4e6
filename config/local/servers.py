"""Start and stop the embedded servers of a state directory, one caller at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psycopg

from config.local.account import server_account
from config.local.endpoints import EmbeddedServerError, Endpoints, read_endpoints, write_private
from config.local.postgres import Postgres
from config.local.processes import open_lock_file, try_lock, wait_until
from config.local.server import Server
from config.local.valkey import Valkey

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
