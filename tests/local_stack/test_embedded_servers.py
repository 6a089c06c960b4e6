"""The embedded PostgreSQL and Valkey: real servers, real kills."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
import redis

from config.environment import ROOT
from config.local import servers
from config.local.account import server_account
from config.local.endpoints import EmbeddedServerError, Endpoints, read_endpoints
from config.local.processes import wait_until


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "state"
    yield folder
    servers.stop_servers(folder)


@pytest.fixture(scope="module")
def shared_dir() -> Iterator[Path]:
    """A folder whose servers run, for tests that change nothing. A cluster takes seconds to make."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    servers.start_servers(folder)
    yield folder
    servers.stop_servers(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shared(shared_dir: Path) -> Endpoints:
    found = read_endpoints(shared_dir)
    assert found
    return found


@pytest.fixture(scope="module")
def spoilt_dir() -> Iterator[Path]:
    """A folder with a cluster, for tests of starts that fail."""
    folder = Path(tempfile.mkdtemp(prefix="spoilt-"))
    servers.start_servers(folder)
    yield folder
    servers.stop_servers(folder)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def spoil(state_dir: Path, name: str, text: str | None) -> Iterator[None]:
    """Stop the servers. Replace a file of the folder by this text or by nothing, until the block ends."""
    servers.stop_servers(state_dir)
    file, kept = state_dir / name, state_dir / name.replace("/", "-")
    file.rename(kept)
    if text is not None:
        file.write_text(text)
        shutil.copymode(kept, file)
        os.chown(file, kept.stat().st_uid, kept.stat().st_gid)
    try:
        yield
    finally:
        servers.stop_servers(state_dir)
        kept.replace(file)


def start_in_a_process(state_dir: Path, **env: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
    return subprocess.Popen(
        [sys.executable, "-m", "config.local", "servers"],
        cwd=ROOT, env={**inherited, "AFTERTOUCH_STATE_DIR": str(state_dir), **env},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ask(endpoints: Endpoints, question: str) -> str:
    with psycopg.connect(endpoints.database_url) as connection:
        row = connection.execute(question).fetchone()
        assert row is not None
        return str(row[0])


def write(endpoints: Endpoints, text: str) -> None:
    with psycopg.connect(endpoints.database_url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS notes (body text)")
        connection.execute("INSERT INTO notes VALUES (%s)", [text])
    with redis.Redis.from_url(endpoints.redis_url) as client:
        client.rpush("notes", text)


def notes(endpoints: Endpoints) -> tuple[list[str], list[str]]:
    with psycopg.connect(endpoints.database_url) as connection:
        rows = [row[0] for row in connection.execute("SELECT body FROM notes").fetchall()]
    with redis.Redis.from_url(endpoints.redis_url, decode_responses=True) as client:
        return rows, client.lrange("notes", 0, -1)


def kill_servers(state_dir: Path) -> None:
    for pid in servers.server_pids(state_dir).values():
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def test_second_start_finds_running_servers(shared_dir: Path, shared: Endpoints) -> None:
    pids = servers.server_pids(shared_dir)
    assert servers.start_servers(shared_dir) == shared == read_endpoints(shared_dir)
    assert servers.server_pids(shared_dir) == pids
    assert all(pids.values())


def test_restart_keeps_data_and_addresses(state_dir: Path) -> None:
    first = servers.start_servers(state_dir)
    write(first, "kept")
    servers.stop_servers(state_dir)
    assert servers.server_pids(state_dir) == {"PostgreSQL": None, "Valkey": None}
    assert read_endpoints(state_dir) is None
    servers.stop_servers(state_dir)  # nothing to end is no error
    assert servers.start_servers(state_dir) == first
    assert notes(first) == (["kept"], ["kept"])


@pytest.mark.processes
def test_accepted_writes_survive_sigkill_of_both_servers(state_dir: Path) -> None:
    endpoints = servers.start_servers(state_dir)
    for times in range(1, 4):
        write(endpoints, str(times))
        kill_servers(state_dir)
        endpoints = servers.start_servers(state_dir)
        expected = [str(number) for number in range(1, times + 1)]
        assert notes(endpoints) == (expected, expected)


@pytest.mark.processes
@pytest.mark.parametrize("moment", ["postgres/data*", "postgres/data", "postgres/data/postmaster.pid", "valkey"])
def test_killed_start_leaves_state_that_starts_again(state_dir: Path, moment: str) -> None:
    starter = start_in_a_process(state_dir)
    assert wait_until(lambda: any(state_dir.glob(moment)), 240, pause=0.001)
    starter.kill()
    starter.communicate()
    write(servers.start_servers(state_dir), "after all")


@pytest.mark.processes
def test_stale_postmaster_pid_does_not_prevent_start(state_dir: Path) -> None:
    write(servers.start_servers(state_dir), "kept")
    kill_servers(state_dir)
    lock = state_dir / "postgres" / "data" / "postmaster.pid"
    lock.write_text(lock.read_text().replace(lock.read_text().split()[0], str(os.getpid()), 1))
    assert notes(servers.start_servers(state_dir)) == (["kept"], ["kept"])


@pytest.mark.processes
def test_removed_folder_gets_new_servers(state_dir: Path) -> None:
    before = servers.start_servers(state_dir)
    shutil.rmtree(state_dir)
    after = servers.start_servers(state_dir)
    assert after != before
    write(after, "new")
    assert notes(after) == (["new"], ["new"])


def test_start_with_changed_password_names_the_cause(spoilt_dir: Path) -> None:
    with (
        spoil(spoilt_dir, "secrets/postgres", "another"),
        pytest.raises(EmbeddedServerError, match="refuses the password"),
    ):
        servers.start_servers(spoilt_dir)


def test_concurrent_starts_agree_on_servers(state_dir: Path) -> None:
    starters = [start_in_a_process(state_dir) for _ in range(3)]
    told = [starter.communicate(timeout=240) for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0, 0], told
    assert len({out for out, _ in told}) == 1  # the same pids


def test_start_with_taken_port_selects_another(state_dir: Path) -> None:
    first = servers.start_servers(state_dir)
    write(first, "kept")
    servers.stop_servers(state_dir)
    taken = [urlsplit(url).port or 0 for url in (first.database_url, first.redis_url)]
    with (
        socket.create_server(("127.0.0.1", taken[0])),
        socket.create_server(("127.0.0.1", taken[1])),
    ):
        second = servers.start_servers(state_dir)
        assert not {urlsplit(url).port for url in (second.database_url, second.redis_url)} & set(taken)
        assert notes(second) == (["kept"], ["kept"])


def test_servers_refuse_missing_password(shared_dir: Path, shared: Endpoints) -> None:
    database, cache = urlsplit(shared.database_url), urlsplit(shared.redis_url)
    for password in ("", "guess"):
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(f"postgresql://aftertouch:{password}@127.0.0.1:{database.port}/aftertouch")
    with redis.Redis(port=cache.port or 0) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    passwords = {str(database.password), str(cache.password)}
    for pid in servers.server_pids(shared_dir).values():
        assert not passwords & set(psutil.Process(pid).cmdline())
    group = 0o010 if os.geteuid() == 0 else 0  # the account of the servers may traverse it
    assert shared_dir.stat().st_mode & 0o777 == 0o700 | group
    assert shared_dir.stat().st_gid == server_account().gid
    assert (shared_dir / "endpoints.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT pg_read_file('/etc/shadow')",
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "CREATE DATABASE another",
        "CREATE ROLE another SUPERUSER",
        "SET ROLE postgres",
        "ALTER SYSTEM SET jit = on",
    ],
)
def test_application_role_cannot_leave_its_database(shared: Endpoints, statement: str) -> None:
    with (
        psycopg.connect(shared.database_url, autocommit=True) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(statement)


def test_pg_hba_requires_scram_everywhere(shared_dir: Path) -> None:
    lines = (shared_dir / "postgres" / "data" / "pg_hba.conf").read_text().splitlines()
    methods = {line.split()[-1] for line in lines if line.strip() and not line.startswith("#")}
    assert methods == {"scram-sha-256"}


def test_servers_listen_on_loopback_with_durable_settings(shared: Endpoints) -> None:
    expected = {"listen_addresses": "127.0.0.1", "synchronous_commit": "on", "fsync": "on", "data_checksums": "on"}
    assert {name: ask(shared, f"SHOW {name}") for name in expected} == expected
    with redis.Redis.from_url(shared.redis_url, decode_responses=True) as client:
        found = client.config_get("bind", "appendonly", "appendfsync", "maxmemory-policy")
    assert found == {
        "bind": "127.0.0.1", "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ({"DATABASE_URL": "postgresql://a@127.0.0.1:1/a"}, {"PostgreSQL": False, "Valkey": True}),
        ({"REDIS_URL": "redis://127.0.0.1:1/0"}, {"PostgreSQL": True, "Valkey": False}),
    ],
)
def test_server_given_by_url_is_not_started(state_dir: Path, given: dict[str, str], runs: dict[str, bool]) -> None:
    starter = start_in_a_process(state_dir, **given)
    _, complaint = starter.communicate(timeout=240)
    assert starter.returncode == 0, complaint
    assert {label: pid is not None for label, pid in servers.server_pids(state_dir).items()} == runs


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("global/pg_control", None, "could not find the database system"),
        ("PG_VERSION", "11\n", "was initialized by PostgreSQL version 11"),
    ],
)
def test_failed_start_shows_last_log_lines(
    spoilt_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, words: str
) -> None:
    monkeypatch.setattr("config.local.server.RETRY_FOR", 0.5)
    with spoil(spoilt_dir, f"postgres/data/{name}", text), pytest.raises(EmbeddedServerError, match=words):
        servers.start_servers(spoilt_dir)
