"""What the back office and the API read: touches by what they are about."""

import pytest
from django.db import connection
from django.utils.timezone import now

from scheduling import sql
from scheduling.ledger import partitions
from scheduling.models import Touch
from scheduling.models.touch import RARE
from scheduling.operations import queries
from tests.support.tables import each_row

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_tables")]


def test_query_touches_finds_event_id_in_all_sources_by_two_queries(matrix, record_event, django_assert_num_queries):
    matrix.node()
    for number in range(5):
        record_event(source=f"s{number}", event_id="e1", user=f"u{number}")
        record_event(source=f"s{number}", event_id="e2", user=f"u{number}")
    with django_assert_num_queries(2):
        found = queries.query_touches(event="e1")[0]
        assert sorted((touch.event.source, touch.node.key, touch.verdicts) for touch in found) == [
            (f"s{number}", "guide", []) for number in range(5)
        ]


def test_query_touches_rare_node_stops_at_the_limit(matrix, record_event, monkeypatch):
    monkeypatch.setattr(queries, "SEARCHED_TOUCHES", 4)
    matrix.node("often")
    matrix.node("rare", trigger="order.paid")
    kinds = [record_event(type).task_ids[0] for type in ["order.paid", *["material.downloaded"] * 8, "order.paid"]]

    pages, before = [], None
    while True:
        found, before = queries.query_touches(node="rare", before=before)
        pages.append([each.pk for each in found])
        if before is None:
            break

    assert pages == [[kinds[-1]], [], [kinds[0]]]
    assert queries.query_touches(node="rare", user="ann") == (
        [*Touch.objects.filter(pk__in=[kinds[0], kinds[-1]]).order_by("-pk")], None,
    )  # fmt: skip
    assert len(queries.query_touches(source="shop", limit=9)[0]) == 4


# --- few among many --------------------------------------------------------------------------------------------------


@pytest.fixture
def many(matrix, record_event):
    """By what they are, newest first: of each rare state a few, and some that a pause keeps; all else was delivered."""
    matrix.node()
    record_event()
    found = sql.rows(_MANY, {"count": 4_000})
    with connection.cursor() as cursor:
        # All tables of the query: a row count that an earlier test left behind changes the order of the joins.
        cursor.execute(
            f"ANALYZE scheduling_touch_live, {_ended_part()}, scheduling_event, scheduling_customer, scheduling_node"
        )
    kinds = sorted({kind for _, kind in found})
    return {kind: sorted((task_id for task_id, each in found if each == kind), reverse=True) for kind in kinds}


def test_rare_states_are_found_by_their_index(many):
    index = f"{_ended_part()}_task_id_state_idx"
    for state in RARE:
        plan = _plan(lambda state=state: queries.query_touches(state=state, limit=3))
        assert [each.pk for each in queries.query_touches(state=state)[0]] == many[state]
        assert [each.pk for each in queries.query_touches(state=state, before=many[state][1])[0]] == many[state][2:]
        assert f" using {index} on" in plan, plan
        before = _count_read_rows()
        queries.query_touches(state=state, limit=3)
        assert _count_read_rows() - before <= len(many[state])
    ((entries,),) = sql.rows("SELECT reltuples::int FROM pg_class WHERE relname = %(name)s", {"name": index})
    assert entries == sum(len(many[state]) for state in RARE), "it has ordinary rows"


@each_row(
    "stands, kinds, index",
    [("bad", ("failed", "unknown"), ""), ("paused", ("paused",), "touch_paused")],
)
def test_effective_state_filter_uses_an_index(many, stands, kinds, index):
    def page():
        return list(Touch.objects.filter(queries.filter_effective_state(stands, now())).order_by("-task_id")[:51])

    plan = _plan(page)
    assert [each.pk for each in page()] == sorted((pk for kind in kinds for pk in many[kind]), reverse=True)[:51]
    if index:
        assert f"Index Scan Backward using {index} on" in plan, plan
    else:
        assert f" {_ended_part()}_task_id_state_idx " in plan, plan


def _ended_part():
    """The partition of touches that end now. Partitions of the future stay without statistics, as in production."""
    return next(each.name for each in partitions.list_partitions() if each.since <= now() < each.until)


def _count_read_rows():
    """Rows of ended touches that this transaction has read."""
    ((rows,),) = sql.rows(
        "SELECT (seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_xact_user_tables WHERE relname = %(name)s",
        {"name": _ended_part()},
    )
    return int(rows)


def _plan(read):
    """Of what is asked for first."""
    asked = []

    def note(execute, statement, parameters, many, context):
        asked.append((statement, parameters))
        return execute(statement, parameters, many, context)

    with connection.execute_wrapper(note):
        read()
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {asked[0][0]}", asked[0][1])
        return "\n".join(row[0] for row in cursor.fetchall())


_MANY = """
WITH event AS (
    INSERT INTO scheduling_event (id, source, event_id, type, occurred_at, received_at, customer_id, user_id, chat_id,
        data)
    SELECT gen_random_uuid(), 'many', n, 'x', now(), now(), customer_id, 'ann', '', '{}'
    FROM generate_series(1, %(count)s) AS n, (SELECT customer_id FROM scheduling_touch LIMIT 1) AS model
    RETURNING id, event_id::int AS n
), touch AS (
    INSERT INTO scheduling_touch (task_id, root_id, state, priority, due_at, planned_at, paused_by, attempt, lease_no,
        wakeups, reason, created_at, event_id, node_id, node_version, customer_id, chat_id, expires_at, content_type,
        counts_toward_cap, settled_at)
    SELECT id, id, state, 1, now(), now(), paused_by, 1, 1, 0, '', now(), id,
        node_id, 1, customer_id, '', now(), '', true, now()
    FROM (SELECT node_id, customer_id FROM scheduling_touch LIMIT 1) AS model, event, LATERAL (
        SELECT CASE WHEN n %% 800 = 0 THEN 'failed' WHEN n %% 800 = 1 THEN 'unknown' WHEN n %% 800 = 2 THEN 'cancelled'
            WHEN n %% 10 = 3 THEN 'scheduled' ELSE 'delivered' END AS state,
            CASE WHEN n %% 40 = 3 THEN 'all' ELSE '' END AS paused_by
    ) AS stands
    RETURNING task_id, state, paused_by
)
SELECT task_id, CASE WHEN paused_by = '' THEN state ELSE 'paused' END FROM touch
"""
