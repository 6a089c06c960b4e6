"""Each hot statement finds its rows by the primary key or by its own partial index, however much has ended (I2).

PostgreSQL's statistics may show that almost nothing waits, that much does, an empty table, or nothing. A statement with
ids must not scan the index of waiting rows because that index looks small. Nor may it read all of an index that has
every row because the table looks empty: for each of 1,000 ids that takes minutes. Nor may it compare each row with
each: for 500 of them that takes 100 ms.
"""

import re
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
from django.db import connection, transaction
from django.utils.timezone import now
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

from rpa_tasks import metrics
from rpa_tasks.jobs.ledger import job_ledger
from scheduling import sql
from scheduling.configuration import snapshot
from scheduling.delivery import due_batch
from scheduling.ids import first_id_at
from scheduling.ledger import locks, partitions
from scheduling.ledger.touches import AGE_UNKNOWN, Sending, touch_ledger
from scheduling.ledger.transitions import Claim, Content, Settlement
from scheduling.models import Customer, Event, Touch
from scheduling.monitoring import collectors, complaint_stats, statistics
from scheduling.operations import retention
from scheduling.planning import cancellation
from scheduling.policy.guards import GuardVerdict
from sessions.detection import silence_events
from tests.rpa_tasks.core.conftest import Market
from tests.support.second_connection import act_on_second_connection

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_tables")]
ENDED, WAITING, RUNNING, CUSTOMERS = 100_000, 20_000, 500, 20_000
LEASE = timedelta(seconds=45)
EMPTY = "it was analyzed while nothing was committed"
NEVER = "it was never analyzed"
KEY = "scheduling_touch_pkey"
JOB_KEY = "rpa_tasks_job_pkey"
ENDED_AT_ONCE = {"state": "'delivered'", "settled_at": "now()", "reserved_at": "now()", "lease_until": "NULL"}
OLDER = dict.fromkeys(["occurred_at", "received_at"], "now() - n * interval '1 second'") | {"event_id": "'old' || n"}


class Ids:
    """Of one batch: rows that wait, and claims of rows that run."""

    def __init__(self, table):
        self.waiting = _column(f"SELECT task_id FROM {table} WHERE state = 'queued' LIMIT 500")
        self.claims = [Claim(task_id, 1) for task_id in _column(f"SELECT task_id FROM {table} WHERE state = 'running'")]
        self.ended = dict.fromkeys(self.claims, Settlement("suppressed", "cap"))


def _column(statement):
    return [row[0] for row in sql.rows(statement, {})]


def passes_over_touches():
    """Statements that look for touches, with the index that finds them."""
    return {
        "dispatch_due": (lambda: touch_ledger.dispatch_due(horizon=LEASE), {"touch_due", "touch_leased", KEY}),
        "has_expired_wakeups": (touch_ledger.has_expired_wakeups, {"touch_leased"}),
        "requeue_expired": (
            lambda: touch_ledger.requeue_expired(trusted_since={1: AGE_UNKNOWN}), {"touch_leased", KEY}
        ),
        "expired_runs": (touch_ledger.expired_runs, {"touch_leased"}),
        "resume": (lambda: touch_ledger.resume_paused("all", spread=LEASE), {"touch_paused_by", "touch_paused", KEY}),
    }  # fmt: skip


def of_touches(ids):
    customers = _column("SELECT id FROM scheduling_customer ORDER BY id LIMIT 500")
    (node,) = snapshot.current().nodes.values()
    sendings = [Sending(claim, node.id, node.channel.id, True, now()) for claim in ids.claims]
    claimed = Settlement("running", content=Content("guide", node.template.id, 1, True), verdict=GuardVerdict("send"))
    decisions = {claimed: ids.waiting}
    since = now() - timedelta(hours=72)
    important = {"customers": customers, "lowest": 2, "hold": timedelta(minutes=1), "nodes": [node.id]}

    def read(statement, **parameters):
        return lambda: sql.rows(statement, parameters)

    by_key = {
        "early": lambda: touch_ledger.premature_wakeups(ids.waiting),
        "settle": lambda: touch_ledger.settle(ids.ended),
        "cancel": lambda: touch_ledger.cancel(ids.waiting, reason="by:ann"),
        "mark_sending": lambda: touch_ledger.mark_sending(sendings),
        "cancel, not waiting": lambda: touch_ledger.cancel(ids.waiting, reason="by:ann", wait=False),
        "write_decisions": lambda: touch_ledger.write_decisions(decisions, at=now(), lease=LEASE),
        "in_doubt": lambda: touch_ledger.with_unknown_outcome(ids.waiting),
        "reschedule": lambda: touch_ledger.reschedule(ids.waiting, [now()] * len(ids.waiting), expires_after=LEASE),
        "defer": lambda: touch_ledger.defer(dict.fromkeys(ids.waiting, Settlement("scheduled", "quota", now()))),
        "lock_due": lambda: touch_ledger.lock_due(ids.waiting),
        "lock_customers_of_touches": lambda: locks.lock_customers_of_touches(ids.waiting),
        "announced": lambda: due_batch.load_announced(ids.waiting, most_bytes=10_000),
    }
    return {name: (act, {KEY}) for name, act in by_key.items()} | {
        "slots": (read(due_batch._SLOTS, owners=customers, since=since), {"touch_history", "touch_waiting"}),
        "community_slots": (read(due_batch._COMMUNITY_SLOTS, owners=["c1", "c2"], since=since), {"touch_chat_history"}),
        "important": (read(due_batch._IMPORTANT, **important), {"touch_waiting"}),
        "unsent": (read(cancellation._UNSENT, customers=customers[:20], nodes=[node.id]), {"touch_waiting"}),
    }


@pytest.mark.parametrize("analyzed", [0, 60])
def test_touch_statements_use_their_indexes(matrix, record_event, analyzed):
    """Also after an ANALYZE of a few rows of one customer, whose statistics outlive those rows."""
    matrix.node()
    (task_id,) = record_event().task_ids
    scale = 4 if analyzed else 2
    with rolled_back():
        fill_customers()
        if analyzed:
            analyze_one_customer(task_id, analyzed)
        with rolled_back():  # the indexes keep their size
            _insert("scheduling_touch", task_id, ENDED_AT_ONCE | {"customer_id": "1000000 + n"}, 150_000 // scale)
        for statistics in fill("scheduling_touch", task_id, {"event_id": "gen_random_uuid()"}, scale=scale):
            ids = Ids("scheduling_touch")
            wanted = of_touches(ids)
            of_passes = passes_over_touches()
            if statistics in (NEVER, EMPTY):  # all that fit look alike; autovacuum may make the first the second
                wanted["community_slots"][1].add("touch_history")
                of_passes["dispatch_due"][1].add("touch_waiting")
            if not analyzed:  # where all rows seem to be queued, a pass may as well read the whole table
                wanted |= of_passes
            wrong = wrong_plans("scheduling_touch", wanted)
            assert not wrong, _format_plans(statistics, wrong)
            if analyzed:
                break  # no second connection can analyze a table that this transaction analyzed


def test_statements_of_passes_and_metrics_bound_their_index(matrix, record_event):
    """The index `touch_due` starts with the priority. Without it each of them reads all touches that wait.

    Counts of a span of time read no older rows.
    """
    node = matrix.node()
    (task_id,) = record_event().task_ids
    most = {"most": 10_000}
    silent = {"nodes": [node.pk], "limit": 1000}
    since, until = now() - timedelta(hours=1), now()
    received = {"first": first_id_at(since), "next": first_id_at(until), "since": since}
    due = {
        "dispatch": lambda: touch_ledger.dispatch_due(horizon=timedelta(seconds=30)),
        "next due": lambda: touch_ledger.seconds_until_due(timedelta(seconds=30)),
        "metrics": lambda: sql.rows(collectors._WAITING, most),
        "due within": lambda: statistics.count_due_within(timedelta(hours=1)),
        "overdue": statistics.count_overdue,
        "undelivered guides": lambda: sql.rows(silence_events._UNDELIVERED, silent),
    }
    looks = {name: (act, r"touch_due", "priority") for name, act in due.items()} | {
        "delivered": (
            lambda: sql.rows(complaint_stats._DELIVERED, {"since": since, "until": until}),
            r"scheduling_touch_ended_\w+_settled_at_task_id_idx", "settled_at",
        ),
        "complaints": (
            lambda: sql.rows(complaint_stats._COMPLAINED, received),
            r"scheduling_complaint_event_id\w*", "event_id",
        ),
    }  # fmt: skip
    waiting = {
        "event_id": "gen_random_uuid()", "state": "'scheduled'", "lease_until": "NULL", "priority": "mod(n, 3)",
        "due_at": "now() + n * interval '1 minute'",
    }  # fmt: skip
    wrong = {}
    with rolled_back():
        keep_autovacuum_from("scheduling_touch")
        _insert("scheduling_touch", task_id, waiting, WAITING)
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE scheduling_touch_live")
            cursor.execute("SET LOCAL enable_seqscan = off")  # one of the gauges counts all rows that wait
        for name, (act, index, column) in looks.items():
            for kind, plan in plans_of(act):
                reads = re.findall(rf"\b{index}\b.*\n(.*)", plan)
                # A generic plan without values needs no partition.
                found = reads or "Subplans Removed" in plan
                if not found or not all(re.search(rf"Index Cond: .*\b{column}\b", line) for line in reads):
                    wrong[f"{name} ({kind})"] = plan
    assert not wrong, _format_plans("", wrong)


@pytest.mark.parametrize("analyzed", [0, 60])
def test_cap_slots_of_a_partition_planned_while_empty_are_probed(matrix, record_event, analyzed):
    """Also where the statistics show 60 rows of one customer."""
    matrix.node()
    (task_id,) = record_event().task_ids
    config = snapshot.current()
    customers = list(range(1_000_001, 1_000_501))

    def count_read_rows():
        due_batch._load_slots(due_batch.CustomerHistory(), customers, [], config, sql.now())
        ((rows,),) = sql.rows(_READ_ROWS, {})
        return int(rows)

    with rolled_back():
        if analyzed:
            _insert("scheduling_touch", task_id, ENDED_AT_ONCE, analyzed)
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE {', '.join(each.name for each in partitions.list_partitions())}")
            cursor.execute("DELETE FROM scheduling_touch WHERE task_id <> %s", [task_id])
        for _ in range(12):  # psycopg prepares a statement at its third run, PostgreSQL keeps a plan after five more
            before = count_read_rows()
        _insert("scheduling_touch", task_id, ENDED_AT_ONCE | {"customer_id": "1000000 + n"}, 10_000)
        assert count_read_rows() - before < len(customers) + 10  # an earlier test may have left a row


def test_held_touch_reads_no_touches_of_events_before_its_own(matrix, record_event):
    """`restart`: only an event that was received after the held touch was planned can have replaced it."""
    matrix.node(on_repeat="restart")
    (task_id,) = record_event().task_ids
    with rolled_back():
        keep_autovacuum_from("scheduling_event")
        _insert("scheduling_event", Touch.objects.get(pk=task_id).event_id, OLDER, 5_000, key="id")
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE scheduling_event, scheduling_touch_live")
        ((plan,),) = sql.rows(f"EXPLAIN (ANALYZE, FORMAT JSON) {due_batch._RESTARTED}", {"ids": [task_id]})
    probes = {each["Alias"]: each["Actual Loops"] for each in iterate_plan(plan[0]["Plan"]) if "Alias" in each}
    assert {count for alias, count in probes.items() if alias.startswith("newer")} == {0}, probes


def test_planning_reads_no_cancelling_events_before_its_own(matrix, record_event):
    """`cancel_on`: a stored event cancels only if it occurred later than the event that is planned."""
    matrix.node(cancel_on=["order.paid"])
    paid = record_event("order.paid").id
    with rolled_back():
        keep_autovacuum_from("scheduling_event")
        _insert("scheduling_event", paid, OLDER, 5_000, key="id")
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE scheduling_event")
        ((before,),) = sql.rows(_READ_EVENTS, {})
        record_event()
        ((after,),) = sql.rows(_READ_EVENTS, {})
    assert after - before < 10


def test_retention_reads_old_rows_by_their_ids(matrix, record_event):
    """Among 30,000 old touches and events, of which most stay, none of its steps reads the table."""
    matrix.node()
    receipt, before = record_event(), now()
    with rolled_back():
        keep_autovacuum_from("scheduling_event")
        _insert("scheduling_event", receipt.id, OLDER, 30_000, key="id")
        failed = {"event_id": "gen_random_uuid()", "state": "'failed'", "settled_at": "now() - interval '9 years'"}
        _insert("scheduling_touch", receipt.task_ids[0], failed | {"lease_until": "NULL"}, 30_000)
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE {partitions.REST}, scheduling_event")
        touch_ids = _column(f"SELECT task_id FROM {partitions.REST} ORDER BY task_id LIMIT {retention.BATCH}")
        event_ids = _column(f"SELECT id FROM scheduling_event ORDER BY id LIMIT {retention.BATCH}")
        plans = [
            plan
            for act in (
                lambda: retention.TOUCHES.delete(touch_ids, before),
                lambda: retention.EVENTS.delete(event_ids, before),
                lambda: retention._created_between(retention.TOUCHES, touch_ids[-1], first_id_at(before)),
            )
            for _, plan in plans_of(act)
        ]
    assert not re.search(f"Seq Scan on ({partitions.REST}|scheduling_event)", "\n".join(plans)), plans


def iterate_plan(node):
    yield node
    for each in node.get("Plans", ()):
        yield from iterate_plan(each)


def test_job_statements_use_their_indexes(matrix):
    market = Market()
    market.shop()
    market.flow()
    task_id = market.publish().task_id
    with rolled_back():
        for statistics in fill("rpa_tasks_job", task_id, {}, scale=4):
            ids = Ids("rpa_tasks_job")
            wanted = {
                "dispatch_due": (lambda: job_ledger.dispatch_due(horizon=LEASE), {"rpa_job_due", JOB_KEY}),
                "expired_runs": (job_ledger.expired_runs, {"rpa_job_leased"}),
                "settle": (partial(job_ledger.settle, ids.claims[0], Settlement("succeeded")), {JOB_KEY}),
                "renew": (partial(job_ledger.renew, ids.claims[0], lease=LEASE), {JOB_KEY}),
                "cancel": (partial(job_ledger.cancel, ids.waiting, reason="by:ann"), {JOB_KEY}),
            }
            wanted["metrics"] = (partial(metrics.read_gauge, metrics.WAITING, 100), {"rpa_job_due"})
            wanted["expired_runs"][1].add("rpa_one_run_a_shop")
            wanted["mark_sending"] = (partial(job_ledger.mark_sending, ids.claims[0]), {JOB_KEY})
            wrong = wrong_plans("rpa_tasks_job", wanted)
            assert not wrong, _format_plans(statistics, wrong)


def _format_plans(statistics, wrong):
    return f"{statistics}:\n" + "\n\n".join(f"{name}:\n{plan}" for name, plan in wrong.items())


def wrong_plans(table, wanted):
    """The plans that read `table` by something else or join rows without a key, by the statement's name."""
    found, parts = {}, "|".join(list_filled_parts(table))
    live = "scheduling_touch_live" if table == "scheduling_touch" else table
    for name, (act, indexes) in wanted.items():
        for kind, plan in plans_of(act):
            used = set(re.findall(rf"using (\w+?)(?:_[0-9a-f]{{8}})? on {live}\b", plan)) | _bitmaps(plan, table)
            whole = re.search(rf"using {table}_\w+ on (?:{parts})\b.*\n(?! +Index Cond)", plan)
            by_time = re.search(r"scheduling_touch_ended_\w+_settled_at_idx", plan)
            scanned = whole or by_time or re.search(rf"Seq Scan on (?:{parts})\b", plan)
            each_with_each = re.search(r"Join Filter: .*task_id", plan)
            if scanned or each_with_each or not used or not used <= indexes:
                found[f"{name} ({kind})"] = plan
    return found


def _bitmaps(plan, table):
    own = ("rpa_job_", "rpa_tasks_job_", "rpa_one_run_a_shop")
    prefixes = ("touch_", "scheduling_touch_") if table == "scheduling_touch" else own
    found = re.findall(r"Bitmap Index Scan on (\w+?)(?:_[0-9a-f]{8})?\b", plan)
    return {name for name in found if name.startswith(prefixes) and not name.startswith("scheduling_touch_ended")}


def list_filled_parts(table):
    """The tables that store its rows, without partitions of the future: those are not analyzed."""
    return _column(
        f"SELECT COALESCE(p.relid, t)::text FROM (SELECT '{table}'::regclass AS t) AS one"
        " LEFT JOIN LATERAL pg_partition_tree(t) AS p ON true WHERE pg_relation_size(COALESCE(p.relid, t)) > 0"
    )


def plans_of(act):
    """How PostgreSQL would run the first statement of `act` with these parameters, and with any (a prepared one)."""
    found = []

    def capture(execute, statement, params, many, context):
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


_READ_ROWS = """
SELECT sum(COALESCE(seq_tup_read, 0) + COALESCE(idx_tup_fetch, 0))::bigint FROM pg_stat_xact_user_tables
WHERE relname LIKE 'scheduling_touch_ended_%%'
"""
_READ_EVENTS = """
SELECT COALESCE(seq_tup_read, 0) + COALESCE(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables
WHERE relname = 'scheduling_event'
"""


def _text(cursor):
    return "\n".join(row[0] for row in cursor.fetchall())


@contextmanager
def rolled_back():
    """So that the foreign keys of the rows, which are deferred, are never checked."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def keep_autovacuum_from(*tables):
    """Until the end of the transaction: it would count the rows that are not committed as none."""
    with connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {', '.join(tables)} IN SHARE UPDATE EXCLUSIVE MODE")


def fill_customers():
    keep_autovacuum_from("scheduling_customer", "scheduling_event")
    customer, event = Customer.objects.get(), Event.objects.get()
    named = {"user_id": "'user-' || n"}
    _insert("scheduling_customer", customer.pk, named | {"id": "1000000 + n"}, CUSTOMERS, key="id")
    _insert(
        "scheduling_event", event.pk, named | {"event_id": "n::text", "customer_id": "1000000 + n"}, CUSTOMERS, key="id"
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE scheduling_customer, scheduling_event")


def fill(table, like, own, *, scale=1):
    """Insert many ended rows and 20,000 waiting ones like the row `like`. Yield each state of the statistics."""
    ended = {"state": "'delivered'", "settled_at": "now() - n * interval '4 seconds'", "lease_no": "1"}
    ended["lease_until"] = "NULL"
    if table == "scheduling_touch":
        ended |= {"reserved_at": "now() - n * interval '4 seconds'", "customer_id": f"1000001 + mod(n, {CUSTOMERS})"}
        ended |= {"chat_id": "'c' || mod(n, 1000)"}
    else:
        ended |= {"state": "'succeeded'", "fresh": "false"}
    queued = {
        **{name: value for name, value in ended.items() if name in ("customer_id", "fresh")},
        "state": "'queued'", "lease_until": "now() + n * interval '1 millisecond'", "due_at": "now()",
        "lease_no": "0", **({"queued_at": "now()"} if table == "scheduling_touch" else {}),
    }  # fmt: skip
    scheduled = queued | {"state": "'scheduled'", "lease_until": "NULL"}
    running = queued | {"state": "'running'", "lease_no": "1"}
    if table == "rpa_tasks_job":
        running["shop_id"] = "1000000 + n"  # a shop runs one job at a time
        queued["lease_until"] = "NULL"
    for changes, count in ((ended, ENDED), (queued, WAITING // 2), (scheduled, WAITING // 2), (running, RUNNING)):
        _insert(table, like, own | changes, count // scale)
    yield NEVER
    analyze_by_second_connection(table)
    keep_autovacuum_from(table)
    yield EMPTY
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE TEMPORARY TABLE kept ON COMMIT DROP AS SELECT * FROM {table} WHERE settled_at IS NULL")
        cursor.execute(f"DELETE FROM {table} WHERE settled_at IS NULL")
        cursor.execute(f"ANALYZE {', '.join(list_filled_parts(table))}")
        cursor.execute(f"INSERT INTO {table} SELECT * FROM kept")
    yield "almost nothing waits"
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {', '.join(list_filled_parts(table))}")
    yield "20,000 wait"


def analyze_by_second_connection(table):
    """As autovacuum does while nothing of this transaction is committed."""
    parts = list_filled_parts(table)
    act_on_second_connection(lambda: sql.execute(f"ANALYZE {', '.join(parts)}", {}))
    found = _column(f"SELECT reltuples FROM pg_class WHERE oid::regclass::text = ANY('{{{','.join(parts)}}}')")
    assert set(found) == {0}


def analyze_one_customer(task_id, rows):
    queued = {"event_id": "gen_random_uuid()", "state": "'queued'", "lease_until": "now()"}
    _insert("scheduling_touch", task_id, queued, rows)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE scheduling_touch_live")
        cursor.execute("DELETE FROM scheduling_touch WHERE task_id <> %s", [task_id])


def _insert(table, like, changes, count, *, key="task_id"):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
            [table],
        )
        columns = [row[0] for row in cursor.fetchall()]
        changes = {key: "gen_random_uuid()"} | changes
        values = ", ".join(changes.get(column, f"row.{column}") for column in columns)
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table} AS row,"
            f" generate_series(1, {count}) AS n WHERE row.{key} = %s",
            [like],
        )
