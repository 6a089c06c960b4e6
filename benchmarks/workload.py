"""Create the measured rows: a small matrix, customers, and touches as if planned earlier."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connection

from scheduling import sql
from scheduling.ids import new_id
from scheduling.models import ChannelConfig, HarassmentRule, Node, Stage, Template, TemplateText

BODY = "您好 {{ user.name }}，{{ event.data.item }} 的使用指南已经准备好了。"
BULK_TABLES = (
    "scheduling_complaint", "scheduling_failedtask", "scheduling_touch", "scheduling_event", "scheduling_customer",
)  # fmt: skip
MATRIX_TABLES = (
    "scheduling_node", "scheduling_template", "scheduling_channelconfig", "scheduling_stage",
    "scheduling_harassmentrule",
)  # fmt: skip


#: Conditions that hold for every touch, by what they read.
EVENT_AND_LEVEL = {
    "all": [
        {"field": "event.data.order", "op": "gte", "value": 1},
        {"any": [
            {"field": "customer.level", "op": "in", "value": ["vip", "normal"]},
            {"field": "chat_id", "op": "exists"},
        ]},
    ]
}  # fmt: skip
PROFILE_AND_EVENTS = {
    "all": [
        *EVENT_AND_LEVEL["all"],
        {"field": "customer.tags", "op": "contains", "value": "tea"},
        {"field": "customer.events.order.paid.count", "op": "eq", "value": 0},
    ]
}


@dataclass(frozen=True)
class Plan:
    """Customer, node and due time of one touch."""

    customer: int
    node: Node
    due_at: datetime


def create_matrix(
    *, nodes: int = 1, channel: str = "log", config: dict[str, str] | None = None,
    conditions: dict[str, Any] | None = None,
) -> list[Node]:  # fmt: skip
    """Replace the matrix: the article's limits, and `nodes` nodes with one content type each.

    With `conditions` each node also has a send window and two content variants, of which the second one applies.
    """
    _empty_tables((*BULK_TABLES, *MATRIX_TABLES))
    HarassmentRule.objects.create(kind="cap", limit=3, window=timedelta(hours=24))
    HarassmentRule.objects.create(kind="dedupe", window=timedelta(hours=72))
    HarassmentRule.objects.create(kind="conversation")
    stage = Stage.objects.create(key="presale")
    way = ChannelConfig.objects.create(key=channel, kind=channel, config=config or {}, idempotent=True)
    cells = [_create_node(stage, way, f"guide-{number}") for number in range(nodes)]
    for node in cells if conditions else ():
        vip = {"all": [{"field": "customer.level", "op": "eq", "value": "vip"}]}
        node.variants = [
            {"key": f"v{place}", "template": node.key, "when": each} for place, each in enumerate((vip, conditions))
        ]
        node.when, node.send_window = conditions, [{"days": ["daily"], "from": "00:00", "to": "24:00"}]
        node.save()
    return cells


def _create_node(stage: Stage, channel: ChannelConfig, key: str) -> Node:
    template = Template.objects.create(key=key, content_type=key, category="service")
    TemplateText.objects.create(template=template, body=BODY)
    return Node.objects.create(
        key=key, stage=stage, trigger=f"bench.{key}", delay=timedelta(minutes=15), template=template, channel=channel
    )


def delete_all() -> None:
    """Delete all touches, events and customers."""
    _empty_tables(BULK_TABLES)


def _empty_tables(tables: Sequence[str]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY CASCADE")


def create_customers(count: int, *, tagged: bool = False) -> None:
    """Create customers with the ids 1 to `count`."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO scheduling_customer"
            " (id, user_id, name, level, locale, timezone, addresses, opted_out, created_at)"
            " SELECT n, 'user-' || n, 'Customer ' || n, 'normal', 'zh-hans', '', '{}', false, now()"
            " FROM generate_series(1, %s) AS n",
            [count],
        )
        if tagged:
            cursor.execute(
                "INSERT INTO scheduling_customerprofile (customer_id, attributes, tags, name)"
                " SELECT id, '{}', '{tea}', name FROM scheduling_customer"
                " ON CONFLICT (customer_id) DO UPDATE SET tags = EXCLUDED.tags"
            )


def plan_touches(plans: Sequence[Plan], *, analyze: bool = True) -> None:
    """Store an event and a scheduled touch for each plan, as ingest would have done earlier."""
    happened_at = datetime.now(UTC) - timedelta(minutes=15)
    events = [(new_id(), new_id(), each) for each in plans]
    with connection.cursor() as cursor:
        with cursor.copy(_COPY_EVENTS) as copy:
            for event_id, _, each in events:
                copy.write_row((
                    event_id, "bench", str(event_id), each.node.trigger, happened_at, happened_at, each.customer,
                    f"user-{each.customer}", "", json.dumps({"item": "Aftertouch", "order": each.customer}),
                ))  # fmt: skip
        with cursor.copy(_COPY_TOUCHES) as copy:
            for event_id, task_id, each in events:
                copy.write_row((
                    task_id, task_id, "scheduled", each.node.priority, each.due_at, each.due_at, "", 0, 0, 0, "",
                    happened_at, event_id, each.node.pk, each.node.version, each.customer, "",
                    each.due_at + each.node.expires_after, "", True,
                ))  # fmt: skip
        if analyze:
            _analyze(cursor)


def plan_over_a_week(count: int, node: Node, *, customers: int, analyze: bool = True) -> None:
    """Create touches that fall due evenly over the next seven days, in one statement."""
    _fill_rows(_FILL, count, node, customers=customers, analyze=analyze)


def fill_ended(
    count: int, node: Node, *, customers: int, analyze: bool = True, first: int = 0,
    oldest: timedelta = timedelta(days=80), newest: timedelta = timedelta(days=10),
) -> None:  # fmt: skip
    """Write touches that were delivered between `oldest` and `newest` ago, each with its event, verdict and attempt.

    `first` numbers the events, so that a second call adds others.
    """
    ages = {"first": first, "oldest": oldest, "length": oldest - newest}
    _fill_rows(_FILL_ENDED, count, node, customers=customers, analyze=analyze, **ages)


def _fill_rows(
    statement: str, count: int, node: Node, *, customers: int, analyze: bool, **ages: timedelta | int
) -> None:
    values = {
        "count": count, "customers": customers, "node": node.pk, "type": node.trigger, "body": BODY,
        "content_type": node.template.content_type, **ages,
    }  # fmt: skip
    with connection.cursor() as cursor:
        # The references are valid by construction. Checking two million would take longer than the benchmark.
        cursor.execute("SET session_replication_role = replica")
        try:
            cursor.execute(statement, values)
        finally:
            cursor.execute("RESET session_replication_role")
        if analyze:
            _analyze(cursor)
        cursor.execute("CHECKPOINT")  # writes the new pages to disk before the measurement


def _analyze(cursor: Any) -> None:
    for table in BULK_TABLES[-3:]:
        cursor.execute(f"VACUUM ANALYZE {table}")


def is_dispatched_ahead(due_at: Sequence[datetime]) -> bool:
    """Return whether as many touches as may be are dispatched before they are due: all, or a window of one moment."""
    expected = sum(min(count, settings.AFTERTOUCH_DISPATCH_WINDOW // 2) for count in Counter(due_at).values())
    return count_rows("state = 'queued'") >= expected


def all_calls_ended() -> bool:
    """Return whether the end of each call is committed. Cheap enough for a hundred calls a second: it is prepared."""
    return not sql.rows(_SOME_CALL, {})


_SOME_CALL = """
SELECT 1 FROM scheduling_touch_live WHERE state IN ('queued', 'running')
UNION ALL
SELECT 1 FROM scheduling_touch_live
WHERE state = 'scheduled' AND paused_by = '' AND lease_no = 0 AND due_at < now() + interval '1 hour'
LIMIT 1
"""


def count_undecided() -> int:
    """Count touches without a decision. A deferred touch counts as decided."""
    return count_rows(
        "state IN ('queued', 'running')"
        " OR (state = 'scheduled' AND lease_no = 0 AND due_at < now() + interval '1 hour')"
    )


def count_rows(condition: str) -> int:
    """Count the touches that a condition selects."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM scheduling_touch WHERE {condition}")
        return int(cursor.fetchone()[0])


def await_finished(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := count_undecided()) and time.monotonic() < deadline:
        time.sleep(0.5)
    if left:
        raise TimeoutError(f"{left} touches are still on their way after {seconds:g} s")


_COPY_EVENTS = """
COPY scheduling_event (id, source, event_id, type, occurred_at, received_at, customer_id, user_id, chat_id, data)
FROM STDIN
"""

_COPY_TOUCHES = """
COPY scheduling_touch (task_id, root_id, state, priority, due_at, planned_at, paused_by, attempt, lease_no, wakeups,
    reason, created_at, event_id, node_id, node_version, customer_id, chat_id, expires_at, content_type,
    counts_toward_cap)
FROM STDIN
"""

_FILL = """
WITH happened AS (
    INSERT INTO scheduling_event (id, source, event_id, type, occurred_at, received_at, customer_id, user_id, chat_id,
        data)
    SELECT uuidv7(), 'waiting', n, %(type)s, now(), now(), n %% %(customers)s + 1, 'user-' || n %% %(customers)s + 1,
        '', '{"item": "Aftertouch"}'
    FROM generate_series(1, %(count)s) AS n
    RETURNING id, event_id::int AS n, customer_id
)
INSERT INTO scheduling_touch (task_id, root_id, state, priority, due_at, planned_at, paused_by, attempt, lease_no,
    wakeups, reason, created_at, event_id, node_id, node_version, customer_id, chat_id, expires_at, content_type,
    counts_toward_cap)
SELECT id, id, 'scheduled', 1, due_at, due_at, '', 0, 0, 0, '', now(), id, %(node)s, 1, customer_id, '',
    due_at + interval '3 days', '', true
FROM happened, LATERAL (SELECT now() + interval '2 hours' + n * (interval '7 days' / %(count)s) AS due_at) AS plan
"""

_FILL_ENDED = """
WITH happened AS (
    INSERT INTO scheduling_event (id, source, event_id, type, occurred_at, received_at, customer_id, user_id, chat_id,
        data)
    SELECT uuidv7(at - now()), 'ended', n, %(type)s, at, at,
        n %% %(customers)s + 1, 'user-' || n %% %(customers)s + 1, '', '{"item": "Aftertouch"}'
    FROM generate_series(%(first)s + 1, %(first)s + %(count)s) AS n, LATERAL (
        SELECT now() - %(oldest)s::interval + (n - %(first)s) * (%(length)s::interval / %(count)s) AS at) AS earlier
    RETURNING id, occurred_at AS at, customer_id
)
INSERT INTO scheduling_touch (task_id, root_id, state, priority, due_at, planned_at, paused_by, attempt, lease_no,
    wakeups, reason, created_at, event_id, node_id, node_version, customer_id, chat_id, expires_at, content_type,
    counts_toward_cap, sending_at, settled_at, reserved_at, template_version, verdicts, attempts)
SELECT id, id, 'delivered', 1, at, at, '', 1, 1, 1, '', at, id, %(node)s, 1, customer_id, '',
    at + interval '3 days', %(content_type)s, true, at, at, at, 1,
    jsonb_build_array(jsonb_build_array(micros, 'send')),
    jsonb_build_array(jsonb_build_array(1, 1, micros, micros, 'delivered', '', '', NULL, '', %(body)s::text))
FROM happened, LATERAL (SELECT (extract(epoch FROM at) * 1000000)::bigint AS micros) AS instant
"""
