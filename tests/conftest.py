"""Real servers for every test: those the environment names, else embedded ones of a state directory of the tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from typing import Any

import hypothesis
import pytest
import redis
from django.db import connection

from config.environment import ROOT, environment
from config.local import servers
from config.local.reaper import Reaper
from tests.slow_machine import raise_time_limits

pytest_plugins = [
    "tests.time_limits", "tests.staff_users", "tests.captured_log", "tests.fault_runs", "tests.parallel_processes",
    "tests.fixed_hour", "tests.emptying", "tests.static_files",
]  # fmt: skip

_reaper = pytest.StashKey[Reaper]()

# How long an example takes says something about the machine, not about the code.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")


def pytest_configure(config: pytest.Config) -> None:
    """Before the first connection: never the servers of a stack that somebody runs in this checkout."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if config.option.numprocesses and not worker:
        config.stash[_reaper] = Reaper.start()
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
    config.stash[_reaper] = Reaper.start(None if keep else env.aftertouch_state_dir)
    servers.start_servers(env.aftertouch_state_dir, postgres=not env.database_url, valkey=not env.redis_url)
    if not env.database_url:
        servers.run_as_administrator(
            env.aftertouch_state_dir,
            "ALTER ROLE aftertouch CREATEDB",  # for the test databases
            "ALTER ROLE aftertouch SET synchronous_commit = off",  # they need not survive a crash
            "GRANT SET ON PARAMETER session_replication_role TO aftertouch",  # see tests/emptying.py
        )
    _point_settings_at(env)
    raise_time_limits()
    with redis.Redis.from_url(env.redis) as client:
        client.flushall()  # what a run that was killed left behind


def pytest_unconfigure(config: pytest.Config) -> None:
    if _reaper in config.stash:
        config.stash[_reaper].end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """In CI every service is there: a test that skips because one is missing has failed."""
    report = yield
    if os.environ.get("CI") == "true" and report.skipped and "missing service" in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped in CI: {report.longrepr}"
    return report


def _point_settings_at(env: Any) -> None:
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
    settings.CHANNEL_LAYERS["default"]["CONFIG"]["hosts"] = [env.redis]
    settings.AFTERTOUCH_STATE_DIR = env.aftertouch_state_dir
    app.conf.broker_url = env.broker


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The threads of the sender keep their connections; the test database could not be dropped under them."""
    from tests.emptying import note_kept_rows

    with django_db_blocker.unblock():
        note_kept_rows()
    yield
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        connection.close()


@pytest.fixture
def matrix(db: None, valkey: Any) -> MatrixBuilder:
    """With nobody in a chat: a server of an earlier test may have noted its last frame after that test's end."""
    return MatrixBuilder()


class MatrixBuilder:
    """A small configuration: one stage, one log channel, nodes on demand, the article's limits."""

    def __init__(self) -> None:
        from scheduling.models import ChannelConfig, HarassmentRule, Stage

        self.stage = Stage.objects.create(key="presale")
        self.channel = ChannelConfig.objects.create(key="log", kind="log", idempotent=True)
        HarassmentRule.objects.create(kind="cap", limit=3, window=timedelta(hours=24))
        HarassmentRule.objects.create(kind="dedupe", window=timedelta(hours=72))
        HarassmentRule.objects.create(kind="conversation")

    def template(self, key: str, content_type: str = "", body: str = "hi {{ user.name }}", **changes: Any) -> Any:
        from scheduling.models import Template, TemplateText

        template, made = Template.objects.get_or_create(
            key=key, defaults={"content_type": content_type or key, **changes}
        )
        if made:
            TemplateText.objects.create(template=template, body=body)
        return template

    def node(self, key: str = "guide", trigger: str = "material.downloaded", **changes: Any) -> Any:
        from scheduling.models import Node

        changes.setdefault("template", self.template(key))
        changes.setdefault("channel", self.channel)
        return Node.objects.create(key=key, stage=self.stage, trigger=trigger, **changes)


@pytest.fixture
def record_event() -> Callable[..., Any]:
    """Record one event; returns its receipt."""
    from scheduling.ids import new_id
    from scheduling.planning.ingest import NewEvent, record_events

    def record_event(type: str = "material.downloaded", user: str = "ann", **changes: Any) -> Any:
        event = NewEvent(
            source=changes.pop("source", "shop"),
            event_id=changes.pop("event_id", str(new_id())),
            type=type,
            user_id=user,
            **changes,
        )
        return record_events([event])[0]

    return record_event


@pytest.fixture
def valkey(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The test server, empty before and after: who chats here is in the middle of a conversation everywhere."""
    with redis.Redis.from_url(environment().redis) as client:
        client.flushall()
        yield client
        client.flushall()
