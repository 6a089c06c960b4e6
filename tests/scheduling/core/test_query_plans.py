"""Each hot statement finds its rows by the primary key or by its own partial index, however much has ended (I2).

PostgreSQL's statistics may say that almost nothing waits, that much does, that the table is empty, or nothing at all. A
statement that was given ids must not scan the index of all that waits because that index looks small. Nor may it read
all of an index that has every row because the table looks empty: for each of 1,000 ids that takes minutes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest
from django.db import connection, transaction
from django.utils.timezone import now
from psycopg import sql as sql_text
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

from rpa_tasks.jobs.pick import jobs
from scheduling import sql
from scheduling.configuration import snapshot
from scheduling.delivery import announced, due_batch
from scheduling.ledger import locks
from scheduling.ledger.touches import Sending, TouchDecision, touches
from scheduling.ledger.transitions import AGE_UNKNOWN, Claim, Content, Ledger, Settlement
from scheduling.planning import cancellation
from scheduling.policy.guards import GuardVerdict
from tests.rpa_tasks.core.conftest import Market

pytestmark = pytest.mark.django_db
ENDED, WAITING, RUNNING, CUSTOMERS = 100_000, 20_000, 500, 20_000
LEASE = timedelta(seconds=45)
EMPTY = "it was analyzed while nothing was committed"
NEVER = "it was never analyzed"
KEY = "scheduling_touch_pkey"
JOB_KEY = "rpa_tasks_job_pkey"


class Ids:
    """Of one batch: rows that wait, and claims of rows that run."""

    def __init__(self, table: str) -> None:
        self.waiting = _column(f"SELECT task_id FROM {table} WHERE state = 'queued' LIMIT 500")
        self.claims = [Claim(task_id, 1) for task_id in _column(f"SELECT task_id FROM {table} WHERE state = 'running'")]
        self.ended = dict.fromkeys(self.claims, Settlement("suppressed", "cap"))


def _column(statement: str) -> list[Any]:
    return [row[0] for row in sql.rows(statement, {})]


def of_ledger(ledger: Ledger, ids: Ids) -> dict[str, Callable[[], Any]]:
    """Statements that both ledgers share and that are given ids."""
    return {
        "early": lambda: ledger.premature_wakeups(ids.waiting),
        "settle": lambda: ledger.settle(ids.ended),
        "renew": lambda: ledger.renew(ids.claims[0], lease=LEASE),
        "cancel": lambda: ledger.cancel(ids.waiting, reason="by:ann"),
        "move": lambda: ledger.move(ids.waiting, [now()] * len(ids.waiting)),
    }


def by_own_index(ledger: Ledger, table: str) -> dict[str, tuple[Callable[[], Any], set[str]]]:
    """Statements of both ledgers that look for rows, with the index that finds them."""
    key = {KEY, JOB_KEY}
    return {
        "dispatch_due": (
            lambda: ledger.dispatch_due(horizon=timedelta(seconds=30)),
            {f"{table}_due", "touch_leased"} | key,
        ),
        "has_expired_wakeups": (ledger.has_expired_wakeups, {f"{table}_leased"}),
        "requeue_expired": (lambda: ledger.requeue_expired(trusted_since={1: AGE_UNKNOWN}), {f"{table}_leased"} | key),
        "expired_runs": (ledger.expired_runs, {f"{table}_leased"}),
        "unpark": (lambda: ledger.resume_paused("all", spread=LEASE), {f"{table}_parked", "touch_paused"} | key),
    }


def of_touches(ids: Ids) -> dict[str, tuple[Callable[[], Any], set[str]]]:
    customers = _column("SELECT id FROM scheduling_customer ORDER BY id LIMIT 500")
    (node,) = snapshot.current().nodes.values()
    sendings = [Sending(claim, node.id, node.channel.id, True, now()) for claim in ids.claims]
    claimed = Settlement("running", content=Content("guide", node.template.id, 1, True))
    decisions = {TouchDecision(claimed, GuardVerdict("send")): ids.waiting}
    window = {"window": timedelta(hours=72)}
    important = {"customers": customers, "lowest": 2, "hold": timedelta(minutes=1), "nodes": [node.id]}

    def read(statement: str, **parameters: Any) -> Callable[[], Any]:
        return lambda: sql.rows(statement, parameters)

    by_key = {
        "claim": lambda: touches.claim(ids.waiting, lease=LEASE),
        "mark_sending": lambda: touches.mark_sending(sendings),
        "cancel, not waiting": lambda: touches.cancel(ids.waiting, reason="by:ann", wait=False),
        "settle_batch": lambda: touches.settle_batch(decisions, at=now(), lease=LEASE),
        "in_doubt": lambda: touches.with_unknown_outcome(ids.waiting),
        "lock_due": lambda: touches.lock_due(ids.waiting),
        "lock_customers": lambda: locks.lock_customers(ids.waiting),
        "announced": lambda: announced.load_announced(ids.waiting, most_bytes=10_000),
    }
    return {name: (act, {KEY}) for name, act in by_key.items()} | {
        "slots": (read(due_batch._SLOTS, customers=customers, **window), {"touch_history"}),
        "community_slots": (read(due_batch._COMMUNITY_SLOTS, chats=["c1", "c2"], **window), {"touch_chat_history"}),
        "important": (read(due_batch._IMPORTANT, **important), {"touch_waiting"}),
        "unsent": (
            read(cancellation._UNSENT, customers=customers[:20], nodes=[node.id]),
            {"touch_waiting"},
        ),
    }


def test_touch_statements_use_their_indexes(matrix: Any, record_event: Any) -> None:
    matrix.node()
    (task_id,) = record_event().task_ids
    with rolled_back():
        fill_customers()
        for statistics in fill("scheduling_touch", task_id, {"event_id": "gen_random_uuid()"}):
            ids = Ids("scheduling_touch")
            wanted = of_touches(ids) | by_own_index(touches, "touch")
            wanted |= {name: (act, {KEY}) for name, act in of_ledger(touches, ids).items()}
            if statistics in (NEVER, EMPTY):  # all that fit look alike; autovacuum may make the first the second
                wanted["community_slots"][1].add("touch_history")
                wanted["dispatch_due"][1].add("touch_waiting")
            wrong = wrong_plans("scheduling_touch", wanted)
            assert not wrong, _format_plans(statistics, wrong)


def test_job_statements_use_their_indexes(matrix: Any) -> None:
    market = Market()
    market.shop()
    market.flow()
    task_id = market.publish().task_id
    with rolled_back():
        for statistics in fill("rpa_tasks_job", task_id, {}, scale=4):
            ids = Ids("rpa_tasks_job")
            wanted = by_own_index(jobs, "rpa_job")
            wanted["expired_runs"][1].add("rpa_one_run_a_shop")
            wanted["mark_sending"] = (partial(jobs.mark_sending, ids.claims), {JOB_KEY})
            wanted |= {name: (act, {JOB_KEY}) for name, act in of_ledger(jobs, ids).items()}
            wrong = wrong_plans("rpa_tasks_job", wanted)
            assert not wrong, _format_plans(statistics, wrong)


def _format_plans(statistics: str, wrong: Mapping[str, str]) -> str:
    return f"{statistics}:\n" + "\n\n".join(f"{name}:\n{plan}" for name, plan in wrong.items())


def wrong_plans(table: str, wanted: Mapping[str, tuple[Callable[[], Any], set[str]]]) -> dict[str, str]:
    """The plans that read `table` by something else, by the statement's name."""
    found = {}
    for name, (act, indexes) in wanted.items():
        for kind, plan in plans_of(act):
            used = set(re.findall(rf"using (\w+?)(?:_[0-9a-f]{{8}})? on {table}\b", plan)) | _bitmaps(plan, table)
            whole = re.search(rf"using {table}_\w+ on {table}\b.*\n(?! +Index Cond)", plan)
            if whole or f"Seq Scan on {table}" in plan or not used or not used <= indexes:
                found[f"{name} ({kind})"] = plan
    return found


def _bitmaps(plan: str, table: str) -> set[str]:
    prefixes = ("touch_", "scheduling_touch_") if table == "scheduling_touch" else ("rpa_job_", "rpa_tasks_job_")
    found = re.findall(r"Bitmap Index Scan on (\w+?)(?:_[0-9a-f]{8})?\b", plan)
    return {name for name in found if name.startswith(prefixes)}


def plans_of(act: Callable[[], Any]) -> Iterator[tuple[str, str]]:
    """How PostgreSQL would run the first statement of `act` with these parameters, and with any (a prepared one)."""
    found: list[tuple[str, Any]] = []

    def capture(execute: Any, statement: str, params: Any, many: bool, context: Any) -> Any:
        found.append((statement, params))
        return execute(statement, params, many, context)

    with rolled_back(), connection.execute_wrapper(capture):
        act()
    statement, params = next(
        each for each in found if "SAVEPOINT" not in each[0] and "scheduling_conf" not in each[0][:80]
    )
    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN " + statement, params)
        yield "custom", _text(cursor)
        query = PostgresQuery(Transformer(connection.connection))
        query.convert(statement, params)
        types = ", ".join(_column(f"SELECT format_type({oid}, NULL)")[0] if oid else "unknown" for oid in query.types)
        cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        cursor.execute(f"PREPARE hot{f' ({types})' if types else ''} AS {query.query.decode()}".replace("%", "%%"))
        nulls = ", ".join("NULL" for _ in query.types)
        cursor.execute(f"EXPLAIN EXECUTE hot{f'({nulls})' if nulls else ''}")
        yield "generic", _text(cursor)
        cursor.execute("DEALLOCATE hot")
        cursor.execute("SET LOCAL plan_cache_mode = auto")


def _text(cursor: Any) -> str:
    return "\n".join(row[0] for row in cursor.fetchall())


@contextmanager
def rolled_back() -> Iterator[None]:
    """So that the foreign keys of the rows, which are deferred, are never checked."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def keep_autovacuum_from(*tables: str) -> None:
    """Until the end of the transaction: it would count the rows that are not committed as none."""
    with connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {', '.join(tables)} IN SHARE UPDATE EXCLUSIVE MODE")


def fill_customers() -> None:
    keep_autovacuum_from("scheduling_customer", "scheduling_event")
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO scheduling_customer"
            " (id, user_id, name, level, locale, timezone, addresses, opted_out, created_at)"
            " SELECT 1000000 + n, 'user-' || n, '', '', '', '', '{}', false, now() FROM generate_series(1, %s) AS n",
            [CUSTOMERS],
        )
        cursor.execute("ANALYZE scheduling_customer")
        cursor.execute(
            "INSERT INTO scheduling_event"
            " (id, source, event_id, type, occurred_at, received_at, customer_id, user_id, chat_id, data)"
            " SELECT gen_random_uuid(), 'shop', n::text, 'x', now(), now(), 1000000 + n, 'user-' || n, '', '{}'"
            " FROM generate_series(1, %s) AS n",
            [CUSTOMERS],
        )
        cursor.execute("ANALYZE scheduling_event")


def fill(table: str, like: UUID, own: Mapping[str, str], *, scale: int = 1) -> Iterator[str]:
    """Many rows that ended and 20,000 that wait, like the row `like`; yields what the statistics say by then."""
    ended = {
        "state": "'delivered'",
        "settled_at": "now() - n * interval '4 seconds'",
        "lease_no": "1",
        "lease_until": "NULL",
    }
    if table == "scheduling_touch":
        ended |= {"reserved_at": "now() - n * interval '4 seconds'", "customer_id": f"1000001 + mod(n, {CUSTOMERS})"}
        ended |= {"chat_id": "'c' || mod(n, 1000)"}
    else:
        ended |= {"state": "'succeeded'", "fresh": "false"}
    queued = {
        **{name: value for name, value in ended.items() if name in ("customer_id", "fresh")},
        "state": "'queued'", "lease_until": "now() + n * interval '1 millisecond'", "due_at": "now()",
        "queued_at": "now()", "lease_no": "0",
    }  # fmt: skip
    scheduled = queued | {"state": "'scheduled'", "lease_until": "NULL"}
    running = queued | {"state": "'running'", "lease_no": "1"}
    if table == "rpa_tasks_job":
        running["shop_id"] = "1000000 + n"  # a shop runs one job at a time
    for changes, count in ((ended, ENDED), (queued, WAITING // 2), (scheduled, WAITING // 2), (running, RUNNING)):
        _insert(table, like, own | changes, count // scale)
    yield NEVER
    analyze_by_second_connection(table)
    keep_autovacuum_from(table)
    yield EMPTY
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE TEMPORARY TABLE kept ON COMMIT DROP AS SELECT * FROM {table} WHERE settled_at IS NULL")
        cursor.execute(f"DELETE FROM {table} WHERE settled_at IS NULL")
        cursor.execute(f"ANALYZE {table}")
        cursor.execute(f"INSERT INTO {table} SELECT * FROM kept")
    yield "almost nothing waits"
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {table}")
    yield "20,000 wait"


def analyze_by_second_connection(table: str) -> None:
    """As autovacuum does while nothing of this transaction is committed."""
    parameters = connection.get_connection_params()
    given = {name: parameters[name] for name in ("host", "port", "user", "password", "dbname")}
    with psycopg.connect(**given, autocommit=True) as other:
        other.execute(sql_text.SQL("ANALYZE {}").format(sql_text.Identifier(table)))
    assert _column(f"SELECT reltuples FROM pg_class WHERE oid = '{table}'::regclass") == [0]


def _insert(table: str, like: UUID, changes: Mapping[str, str], count: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
            [table],
        )
        columns = [row[0] for row in cursor.fetchall()]
        changes = {"task_id": "gen_random_uuid()"} | changes
        values = ", ".join(changes.get(column, f"row.{column}") for column in columns)
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table} AS row,"
            f" generate_series(1, {count}) AS n WHERE row.task_id = %s",
            [like],
        )
