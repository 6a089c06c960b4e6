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
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
import redis

from config.environment import ROOT
from config.local import servers
from config.local.endpoints import EmbeddedServerError, Endpoints, read_endpoints
from config.local.processes import wait_until
from config.local.servers import server_account


@pytest.fixture(scope="module")
def shared_dir() -> Iterator[Path]:
    """A folder with a cluster, which takes seconds to make."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    servers.start_servers(folder)
    yield folder
    servers.stop_servers(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shared(shared_dir: Path) -> Endpoints:
    """Its servers run."""
    return servers.start_servers(shared_dir)


@pytest.fixture
def stopped_dir(shared_dir: Path) -> Path:
    """Its servers do not run."""
    servers.stop_servers(shared_dir)
    return shared_dir


@pytest.fixture
def new_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "state"
    yield folder
    servers.stop_servers(folder)


@contextmanager
def spoil(stopped_dir: Path, name: str, text: str) -> Iterator[None]:
    """Replace the text of a file of the folder until the block ends."""
    file, kept = stopped_dir / name, stopped_dir / name.replace("/", "-")
    file.rename(kept)
    file.write_text(text)
    shutil.copymode(kept, file)
    os.chown(file, kept.stat().st_uid, kept.stat().st_gid)
    try:
        yield
    finally:
        servers.stop_servers(stopped_dir)
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
    """Both servers note only this text."""
    with psycopg.connect(endpoints.database_url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS notes (body text)")
        connection.execute("DELETE FROM notes")
        connection.execute("INSERT INTO notes VALUES (%s)", [text])
    with redis.Redis.from_url(endpoints.redis_url) as client:
        client.set("note", text)


def read(endpoints: Endpoints) -> tuple[str, str | None]:
    with redis.Redis.from_url(endpoints.redis_url, decode_responses=True) as client:
        return ask(endpoints, "SELECT string_agg(body, ',') FROM notes"), client.get("note")


def kill_servers(state_dir: Path) -> None:
    for pid in servers.server_pids(state_dir).values():
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


def test_second_start_finds_running_servers(shared_dir: Path, shared: Endpoints) -> None:
    pids = servers.server_pids(shared_dir)
    assert servers.start_servers(shared_dir) == shared == read_endpoints(shared_dir)
    assert servers.server_pids(shared_dir) == pids
    assert all(pids.values())


def test_restart_keeps_data_and_addresses(shared_dir: Path, shared: Endpoints) -> None:
    write(shared, "kept")
    servers.stop_servers(shared_dir)
    assert servers.server_pids(shared_dir) == {"PostgreSQL": None, "Valkey": None}
    assert read_endpoints(shared_dir) is None
    servers.stop_servers(shared_dir)  # nothing to end is no error
    assert servers.start_servers(shared_dir) == shared
    assert read(shared) == ("kept", "kept")


def test_accepted_writes_survive_sigkill_of_both_servers(shared_dir: Path, shared: Endpoints) -> None:
    """Also where the pid of the dead PostgreSQL belongs to another process by now."""
    write(shared, "first")
    kill_servers(shared_dir)
    assert read(servers.start_servers(shared_dir)) == ("first", "first")
    write(shared, "second")
    kill_servers(shared_dir)
    lock = shared_dir / "postgres" / "data" / "postmaster.pid"
    lock.write_text(lock.read_text().replace(lock.read_text().split()[0], str(os.getpid()), 1))
    assert read(servers.start_servers(shared_dir)) == ("second", "second")


def test_killed_first_start_leaves_state_that_starts_again(new_dir: Path) -> None:
    kill_start(new_dir, "postgres/data.*")
    write(servers.start_servers(new_dir), "after all")


def test_killed_start_leaves_state_that_starts_again(stopped_dir: Path) -> None:
    kill_start(stopped_dir, "postgres/data/postmaster.pid")
    write(servers.start_servers(stopped_dir), "after all")


def kill_start(state_dir: Path, moment: str) -> None:
    """Kill a start in the moment when there is such a file."""
    starter = start_in_a_process(state_dir)
    assert wait_until(lambda: any(state_dir.glob(moment)), 240, pause=0.001)
    starter.kill()
    starter.communicate()


def test_removed_folder_gets_new_servers(stopped_dir: Path, new_dir: Path) -> None:
    subprocess.run(["cp", "-a", stopped_dir, new_dir], check=True)
    before = servers.start_servers(new_dir)
    shutil.rmtree(new_dir)
    after = servers.start_servers(new_dir)
    assert after != before
    write(after, "new")
    assert read(after) == ("new", "new")


def test_start_with_changed_password_names_the_cause(stopped_dir: Path) -> None:
    with (
        spoil(stopped_dir, "secrets/postgres", "another"),
        pytest.raises(EmbeddedServerError, match="refuses the password"),
    ):
        servers.start_servers(stopped_dir)


def test_concurrent_starts_agree_on_servers(stopped_dir: Path) -> None:
    starters = [start_in_a_process(stopped_dir) for _ in range(3)]
    told = [starter.communicate(timeout=240) for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0, 0], told
    assert len({out for out, _ in told}) == 1  # the same pids


def test_start_with_taken_port_selects_another(shared_dir: Path, shared: Endpoints) -> None:
    write(shared, "kept")
    servers.stop_servers(shared_dir)
    taken = [urlsplit(url).port or 0 for url in (shared.database_url, shared.redis_url)]
    with socket.create_server(("127.0.0.1", taken[0])), socket.create_server(("127.0.0.1", taken[1])):
        second = servers.start_servers(shared_dir)
        assert not {urlsplit(url).port for url in (second.database_url, second.redis_url)} & set(taken)
        assert read(second) == ("kept", "kept")


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
    lines = (shared_dir / "postgres" / "data" / "pg_hba.conf").read_text().splitlines()
    methods = {line.split()[-1] for line in lines if line.strip() and not line.startswith("#")}
    assert methods == {"scram-sha-256"}
    group = 0o010 if os.geteuid() == 0 else 0  # the account of the servers may traverse it
    assert shared_dir.stat().st_mode & 0o777 == 0o700 | group
    assert shared_dir.stat().st_gid == server_account().gid
    assert (shared_dir / "endpoints.json").stat().st_mode & 0o777 == 0o600


def test_application_role_cannot_leave_its_database(shared: Endpoints) -> None:
    accepted = []
    with psycopg.connect(shared.database_url, autocommit=True) as connection:
        for statement in (
            "SELECT pg_read_file('/etc/shadow')",
            "COPY (SELECT 1) TO PROGRAM 'true'",
            "CREATE DATABASE another",
            "CREATE ROLE another SUPERUSER",
            "SET ROLE postgres",
            "ALTER SYSTEM SET jit = on",
        ):
            with suppress(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)
                accepted.append(statement)
    assert accepted == []


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
def test_server_given_by_url_is_not_started(stopped_dir: Path, given: dict[str, str], runs: dict[str, bool]) -> None:
    starter = start_in_a_process(stopped_dir, **given)
    _, complaint = starter.communicate(timeout=240)
    assert starter.returncode == 0, complaint
    assert {label: pid is not None for label, pid in servers.server_pids(stopped_dir).items()} == runs


def test_failed_start_shows_last_log_lines(stopped_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("config.local.servers.RETRY_FOR", 0.5)
    with (
        spoil(stopped_dir, "postgres/data/PG_VERSION", "11\n"),
        pytest.raises(EmbeddedServerError, match="was initialized by PostgreSQL version 11"),
    ):
        servers.start_servers(stopped_dir)
