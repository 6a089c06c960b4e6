"""PgBouncer with the shipped configuration between the programs and PostgreSQL.

Each transaction gets another connection than the one before. State kept on a connection is lost at once.
"""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from config.environment import environment
from config.local.isolated import running_stack
from config.local.processes import select_port, wait_until
from tests.deploy.pooler import PROGRAM, run_pgbouncer
from tests.faults.receiver import EffectReceiver
from tests.faults.workers import celery
from tests.support.small_matrix import LOOK, ONE_SHOP, small_matrix
from tests.support.stack import StackUnderTest, cloud_event
from tests.support.waiting import WAIT_LIMIT

SERVERS = 3
FEW = f"default_pool_size = {SERVERS}\nmin_pool_size = {SERVERS}\nserver_round_robin = 1"
RACING, OTHERS, CAP = 24, 40, 3


def configuration(receiver):
    return small_matrix(
        receiver.channel(idempotent=False),
        {"key": "now", "trigger": "order.paid", "guards": {}},
        harassment_rules=[{"kind": "cap", "scope": "user", "limit": CAP, "window": "24h"}],
        **ONE_SHOP,
    )


# Several commands in one process: each start of Django costs seconds.
SET_UP = """
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import User
from django.core.management import call_command
from scheduling.identity.sign_ins import SessionStore
call_command("apply_config", {file!r})
boss, session = User.objects.create_superuser("boss", password="x"), SessionStore()
session[SESSION_KEY], session[HASH_SESSION_KEY] = str(boss.pk), boss.get_session_auth_hash()
session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
session.save()
print(session.session_key)
call_command("create_api_key", "pooled", "--scope", "events", "--scope", "rpa")
"""


@pytest.fixture
def database():
    """A new one in the tests' own server."""
    url = urlsplit(environment().postgres)
    name = f"pooled_{select_port()}"
    with psycopg.connect(url.geturl(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield url._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.mark.skipif(PROGRAM is None, reason="missing service: pgbouncer")
def test_programs_behind_pgbouncer_deliver_once_and_keep_caps(database):
    env = {
        "AFTERTOUCH_PREPARE_STATEMENTS": "false", "AFTERTOUCH_ALLOWED_PRIVATE_HOSTS": "127.0.0.1",
        "AFTERTOUCH_RPA_SLOTS": "1", "DJANGO_SETTINGS_MODULE": "config.settings.test",
    }  # fmt: skip
    with (
        EffectReceiver(answer_after=(0.0, 0.05)) as receiver,
        run_pgbouncer(database, "transaction", FEW) as pool,
        running_stack({**env, "DATABASE_URL": pool.url}, ["web", "core", "execution"]) as stack,
    ):
        # The lock of the beat that leads is a session's: it needs one to itself.
        own = {"AFTERTOUCH_STATE_DIR": str(stack.state_dir), "DATABASE_URL": database}
        with celery({**stack.environment, **own}, "beat", "-s", str(stack.state_dir / "beat"), log="beat") as beat:
            target = StackUnderTest(stack)
            session = {"Cookie": f"sessionid={_set_up(target, receiver)}"}
            _post_concurrent_events(target)
            target.call("POST", "/api/v1/rpa/jobs", LOOK)
            _check_deliveries_and_cap(stack, pool, receiver)
            assert wait_until(lambda: bool(pool.ask(SUCCEEDED)), WAIT_LIMIT, 0.2), stack.log("execution")[-3000:]
            for path in ("/admin/", "/admin/scheduling/node/add/", "/admin/rpa_tasks/shop/add/", "/health/ready"):
                assert target.ask("GET", path, **session).url.endswith(path), "nobody is logged in"
            overdue = "aftertouch_touches_oldest_overdue_seconds"  # left out of a reading for which time ran out
            assert wait_until(lambda: overdue in target.ask("GET", "/metrics").text, WAIT_LIMIT, 0.5)
            beat.await_log("beat_leads")
            shared = {**stack.environment, "AFTERTOUCH_STATE_DIR": str(stack.state_dir)}
            with celery(shared, "beat", "-s", str(stack.state_dir / "other"), log="misled-beat") as misled:
                misled.await_log("DATABASE_URL leads to a pooler")
                assert misled.await_exit()
            _check_shared_connections(pool)
        with run_pgbouncer(database, "session") as pool:
            _check_session_pooling(stack, pool)
            _check_lock_release(pool)


SUCCEEDED = "SELECT FROM rpa_tasks_job WHERE state = 'succeeded'"
JUDGED = """
SELECT count(*) FILTER (WHERE state = 'delivered') AS delivered, count(*) AS planned,
       count(*) FILTER (WHERE t.verdicts IS NULL) AS waiting
FROM scheduling_touch t
"""
# State that one transaction could leave to another client's. PgBouncer itself sets the named ones.
LEFT = """
SELECT pg_backend_pid() AS pid, (SELECT count(*) FROM pg_prepared_statements) AS statements,
       (SELECT count(*) FROM pg_cursors) AS cursors, pg_my_temp_schema()::int AS temporary,
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()) AS locks,
       (SELECT coalesce(string_agg(name, ' '), '') FROM pg_settings WHERE source = 'session' AND name NOT IN
        ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'standard_conforming_strings')) AS settings
"""
# The same statements again and again, and a list that comes in pieces.
KEPT = """
from scheduling import sql
from scheduling.models import Touch
for _ in range(5):
    read = len(list(Touch.objects.iterator(chunk_size=10)))
    ((prepared,),) = sql.rows("SELECT count(*) FROM pg_prepared_statements", {{}})
assert read == {read} and prepared, (read, prepared)
"""
NOTHING = {"statements": 0, "cursors": 0, "temporary": 0, "locks": 0, "settings": ""}


def _set_up(target, receiver):
    """Return a session of the back office. The API gets a key."""
    file = target.stack.state_dir / "configuration.yaml"
    file.write_text(json.dumps(configuration(receiver)))
    *_, session, target.api_key = target.stack.manage(
        "shell", "--no-imports", "-c", SET_UP.format(file=str(file))
    ).split()
    return session


def _post_concurrent_events(target):
    """Those of one customer from many connections at once, those of others together."""
    events = [cloud_event(f"ann/{number}", "order.paid", "ann") for number in range(RACING)]
    others = [cloud_event(f"user-{number}/0", "order.paid", f"user-{number}") for number in range(OTHERS)]
    with ThreadPoolExecutor(8) as many:
        list(many.map(lambda batch: target.post_events(*batch), [*([event] for event in events), others]))


def _check_deliveries_and_cap(stack, pool, receiver):
    """A touch behind three unsettled ones is deferred for a lease; nothing waits for that."""
    wanted = {"delivered": OTHERS + CAP, "planned": OTHERS + RACING, "waiting": 0}
    assert wait_until(lambda: pool.ask(JUDGED) == [wanted], WAIT_LIMIT, 0.2), stack.log("core")[-3000:]
    calls = [each.event.partition("/")[0] for each in receiver.calls]
    assert Counter(calls) == {"ann": CAP, **{f"user-{number}": 1 for number in range(OTHERS)}}


def _check_shared_connections(pool):
    assert wait_until(lambda: pool.clients() > 2 * SERVERS, WAIT_LIMIT, 0.2), pool.clients()
    assert wait_until(lambda: len(pool.servers()) == SERVERS, WAIT_LIMIT, 0.2), pool.servers()
    found = {}
    with pool.connection() as one:

        def met_all():
            row = one.execute(LEFT).fetchone()
            assert row
            found[row.pop("pid")] = row
            return found.keys() >= set(pool.servers())

        assert wait_until(met_all, WAIT_LIMIT, 0.05), found
    assert found == dict.fromkeys(found, NOTHING)


def _check_session_pooling(stack, pool):
    env = {**stack.environment, "DATABASE_URL": pool.url, "AFTERTOUCH_PREPARE_STATEMENTS": "true"}
    replace(stack, environment=env).manage("shell", "--no-imports", "-c", KEPT.format(read=OTHERS + RACING))


def _check_lock_release(pool):
    """Beat's, for one."""
    take = "SELECT pg_try_advisory_lock(1) AS taken"
    with pool.connection() as standby:
        with pool.connection() as leader:
            assert [each.execute(take).fetchone() for each in (leader, standby)] == [{"taken": True}, {"taken": False}]
        assert wait_until(lambda: standby.execute(take).fetchone() == {"taken": True}, WAIT_LIMIT, 0.1)
