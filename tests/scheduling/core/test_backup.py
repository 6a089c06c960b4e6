"""A dump is brought back while touches wait: the broker knows nothing of them, and each is delivered all the same."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
import redis
from django.db import connection

from config.environment import environment
from config.local.postgres import binaries
from config.local.processes import wait_until
from scheduling.models import ChannelConfig, Touch
from tests.faults.workers import celery, worker
from tests.scheduling.core.conftest import deliver_when_due
from tests.scheduling.core.receivers import ScriptedReceiver
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]
WITHIN = 120  #: seconds; a lost wake-up is trusted for 10 s
CORE = "ticks,long,touch.high,touch.normal,touch.low"


def test_restored_dump_delivers_waiting_touches_once(
    matrix: MatrixBuilder,
    hook: ChannelConfig,
    record_event: RecordEvent,
    receiver: ScriptedReceiver,
    valkey: redis.Redis,
    tmp_path: Path,
) -> None:
    free = dict.fromkeys(("guard_cap", "guard_dedupe", "guard_conversation"), "ignore")
    matrix.node("now", channel=hook, delay=timedelta(0), **free)
    matrix.node("soon", trigger="order.paid", channel=hook, delay=timedelta(seconds=5), **free)
    matrix.node("next-week", trigger="signup.succeeded", channel=hook, delay=timedelta(days=7), **free)
    (before,) = deliver_when_due(*record_event().task_ids)
    handed_over = [record_event("order.paid", user=f"user-{number}").task_ids[0] for number in range(20)]
    waiting = record_event("signup.succeeded").task_ids[0]
    (after,) = record_event(user="bob").task_ids
    assert set(Touch.objects.filter(pk__in=handed_over).values_list("state", flat=True)) == {"queued"}

    _run("pg_dump", "--format=custom", f"--file={tmp_path / 'dump'}", _url())
    deliver_when_due(after)  # only the lost database knew that
    assert receiver.keys == [str(before.pk), str(after)]
    receiver.calls.clear()

    with _restored(tmp_path / "dump") as url:
        valkey.flushall()
        env = {
            **os.environ,
            "DATABASE_URL": url,
            "REDIS_URL": environment().redis,
            "AFTERTOUCH_STATE_DIR": str(tmp_path),
        }
        env["AFTERTOUCH_ALLOWED_PRIVATE_HOSTS"] = "127.0.0.1"
        with worker(env, "-Q", CORE, "-c", "2"), celery(env, "beat", "-s", str(tmp_path / "beat")):
            assert wait_until(_delivered(url, 22), WITHIN, 0.2)
        with psycopg.connect(url) as database:
            states = dict(database.execute("SELECT task_id, state FROM scheduling_touch").fetchall())
    assert sorted(receiver.keys) == sorted(str(each) for each in [*handed_over, after])
    assert states[waiting] == "scheduled"
    assert {states[each] for each in [*handed_over, before.pk, after]} == {"delivered"}


def _delivered(url: str, count: int) -> Callable[[], bool]:
    def delivered() -> bool:
        with psycopg.connect(url) as database:
            row = database.execute("SELECT count(*) FROM scheduling_touch WHERE state = 'delivered'").fetchone()
        return row == (count,)

    return delivered


@contextmanager
def _restored(dump: Path) -> Iterator[str]:
    """A new database out of a dump, in the same server."""
    name = f"restored_{os.getpid()}"
    _run("createdb", f"--maintenance-db={_url()}", name)
    try:
        _run("pg_restore", "--exit-on-error", "--no-owner", f"--dbname={_url(name)}", str(dump))
        yield _url(name)
    finally:
        _run("dropdb", "--force", f"--maintenance-db={_url()}", name)


def _run(program: str, *words: str, env: Mapping[str, str] | None = None) -> None:
    subprocess.run([str(binaries() / program), *words], check=True, env={**os.environ, **(env or {})})


def _url(name: str = "") -> str:
    database = connection.settings_dict
    where = f"{database['USER']}:{database['PASSWORD']}@{database['HOST']}:{database['PORT']}"
    return f"postgresql://{where}/{name or database['NAME']}"
