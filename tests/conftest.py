"""Real servers for every test: those the environment names, else embedded ones of a state directory of the tests."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
import redis
from django.db import connection

from config.environment import ROOT, Environment, environment
from config.local import servers
from config.local.reaper import end_run, start_reaper
from tests.support.longer_limits import raise_time_limits

pytest_plugins = [
    f"tests.support.{name}"
    for name in (
        "tiers", "second_look", "time_limits", "staff_users", "log_capture", "fault_runs", "parallel_processes",
        "fixed_hour", "page_contexts", "table_cleanup", "static_files", "matrix", "second_connection", "integrations",
        "web_process",
    )
]  # fmt: skip

_reaper = pytest.StashKey[subprocess.Popen[bytes]]()

# The same examples and moments of faults in each run; campaigns look for others. Time limits would judge the machine.
_any_pace = {"deadline": None, "database": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("fixed", derandomize=True, **_any_pace)
hypothesis.settings.register_profile("campaign", derandomize=False, print_blob=True, **_any_pace)


def pytest_configure(config: pytest.Config) -> None:
    """Run before the first connection. Never use the servers of a stack that runs in this checkout."""
    keep_bytecode()
    if config.option.markexpr == "campaign":
        hypothesis.settings.load_profile("campaign")
    else:
        hypothesis.settings.load_profile("fixed")
        os.environ.setdefault("FAULTS_SEED", "1")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if config.option.numprocesses and not worker:
        config.stash[_reaper] = start_reaper()
        return  # this process hands tests out and runs none
    if worker:
        # Ctrl-C reaches the whole group. The process that hands tests out ends the others; one that is interrupted
        # while it talks to it can wait for it for ever. Programs that are started here get the default handler.
        signal.signal(signal.SIGINT, lambda *_: None)
    state = os.environ.get("AFTERTOUCH_STATE_DIR", str(ROOT / ".state" / "test"))
    os.environ["AFTERTOUCH_STATE_DIR"] = f"{state}-{worker}" if worker else state
    os.environ.setdefault("AFTERTOUCH_RPA_ISOLATION", "none")
    os.environ.setdefault("AFTERTOUCH_WORKER_MAX", "0")  # the number of processes is that of the test, on any machine
    environment.cache_clear()
    env = environment()
    keep = os.environ.get("AFTERTOUCH_KEEP_SERVERS") == "1"
    if keep:
        servers.start_servers(env.aftertouch_state_dir, postgres=not env.database_url, valkey=not env.redis_url)
    config.stash[_reaper] = start_reaper(None if keep else env.aftertouch_state_dir)
    servers.start_servers(env.aftertouch_state_dir, postgres=not env.database_url, valkey=not env.redis_url)
    if not env.database_url:
        servers.run_as_administrator(
            env.aftertouch_state_dir,
            "ALTER ROLE aftertouch CREATEDB",  # for the test databases
            "ALTER ROLE aftertouch SET synchronous_commit = off",  # they need not survive a crash
            "GRANT SET ON PARAMETER session_replication_role TO aftertouch",  # see tests/support/table_cleanup.py
            "ALTER SYSTEM SET autovacuum = off",  # its moment would decide what a test reads
            "SELECT pg_reload_conf()",
        )
    _point_settings_at(env)
    raise_time_limits()
    with redis.Redis.from_url(env.redis) as client:
        client.flushall()  # what a run that was killed left behind


def keep_bytecode() -> None:
    """Compile each module once, whatever images of containers set. Without its bytecode each process of a run needs
    12 s more for the test modules, and each program that a test starts 0.5 s more.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """Exempt modules and tests from collections of garbage, which would search them again and again: 5 % of a run."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _reaper in config.stash:
        end_run(config.stash[_reaper])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """In CI every service is there: a test that skips because one is missing has failed."""
    report = yield
    if os.environ.get("CI") == "true" and report.skipped and "missing service" in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped in CI: {report.longrepr}"
    return report


def _point_settings_at(env: Environment) -> None:
    from urllib.parse import unquote, urlsplit

    from django.conf import settings

    from config.celery.application import app

    database = urlsplit(env.postgres)
    settings.DATABASES["default"].update(
        HOST=database.hostname,
        PORT=str(database.port),
        USER=unquote(database.username or ""),
        PASSWORD=unquote(database.password or ""),
        NAME=database.path.lstrip("/"),
    )
    settings.REDIS_URL = env.redis
    settings.CELERY_BROKER_URL = env.broker
    settings.AFTERTOUCH_STATE_DIR = env.aftertouch_state_dir
    app.conf.broker_url = env.broker


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup, django_db_blocker) -> Iterator[None]:
    """The threads of the sender keep their connections; the test database could not be dropped under them."""
    from tests.support.table_cleanup import note_rows

    with django_db_blocker.unblock():
        note_rows()
    yield
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        connection.close()


@pytest.fixture
def valkey() -> Iterator[redis.Redis]:
    """The test server, empty before and after: a leftover chat would defer touches of other tests."""
    with redis.Redis.from_url(environment().redis) as client:
        client.flushall()
        yield client
        client.flushall()
