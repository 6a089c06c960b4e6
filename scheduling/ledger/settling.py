"""Statements that change live touches and move those that end to the partition of their end."""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.models import Touch
from scheduling.models.touch_log import MOST_VERDICTS
from scheduling.policy.guards import NODE_DISABLED


def _compose_settling(matched: str, changes: Mapping[str, str]) -> str:
    """Return the parts of a statement that change live rows and move those that end.

    `v` holds the new values, `matched` joins it with the table, `changes` are values by column. An end deletes the live
    row and inserts it into the partition of its end. An UPDATE would move it too, but raise an error in a transaction
    that waits for the row. That transaction finds no row here.
    """
    assigned = ", ".join(f"{column} = {value}" for column, value in changes.items())
    columns = ", ".join(_COLUMNS)
    return f"""
kept AS (
    UPDATE scheduling_touch_live AS row SET {assigned} FROM v
    WHERE {matched} AND v.state IN ('scheduled', 'running')
    RETURNING row.task_id, row.lease_no
), moved AS (
    DELETE FROM scheduling_touch_live AS row USING v
    WHERE {matched} AND v.state NOT IN ('scheduled', 'running')
    RETURNING {_compose_moved(changes)}
), ended AS (
    INSERT INTO scheduling_touch_ended ({columns}) SELECT {columns} FROM moved
)"""


def _compose_moved(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{changes.get(column, f'row.{column}')} AS {column}" for column in _COLUMNS)


_COLUMNS = [str(field.column) for field in Touch._meta.concrete_fields]

_ADD_VERDICT = f"""CASE WHEN v.verdict IS NULL THEN row.verdicts WHEN row.verdicts IS NULL THEN v.verdict
    WHEN jsonb_array_length(row.verdicts) < {MOST_VERDICTS} THEN row.verdicts || v.verdict
    ELSE (row.verdicts - 1) || v.verdict END"""
# The clock of the write, after the transaction has its id: readers of ends rely on this order. A lock may have waited.
_SETTLED_AT = "CASE WHEN v.state NOT IN ('scheduled', 'running') THEN clock_timestamp() END"

# An earlier attempt, or the touch that this one repeats, may have had its effect. Written with EXISTS, PostgreSQL would
# read all ended touches into a hash table. `strict` keeps the path from looking into the entries.
IN_DOUBT = """(
    row.attempts @? 'strict $[*] ? (@[4] == "unknown")'
    OR COALESCE((
        SELECT p.state FROM scheduling_touch_ended AS p
        WHERE p.task_id = row.retry_of AND p.root_id = row.root_id LIMIT 1
    ), '') = 'unknown'
)"""

# An operator confirmed a touch that is sent as new: a deferral does not return it to the cap and to dedupe.
_KEEPS_SLOT = "(NOT v.frees_slot OR v.state = 'scheduled' AND row.retry_of IS NOT NULL AND row.root_id = row.task_id)"

_BATCH_CHANGES = {
    "lease_no": "row.lease_no + 1",
    "wakeups": "0",
    "state": "v.state",
    "reason": "v.reason",
    "paused_by": "v.paused_by",
    "due_at": "COALESCE(v.due_at, row.due_at)",
    "lease_until": "CASE WHEN v.state = 'running' THEN %(at)s + %(lease)s END",
    "sending_at": "NULL::timestamptz",
    "settled_at": _SETTLED_AT,
    "reserved_at": f"""CASE WHEN v.state = 'running' THEN COALESCE(row.reserved_at, %(at)s)
                            WHEN {_KEEPS_SLOT} THEN row.reserved_at END""",
    "content_type": "COALESCE(v.content_type, row.content_type)",
    "template_id": "COALESCE(v.template_id, row.template_id)",
    "template_version": "COALESCE(v.template_version, row.template_version)",
    "counts_toward_cap": "COALESCE(v.counts, row.counts_toward_cap)",
    "verdicts": _ADD_VERDICT,
}
_BATCH_MATCHED = f"""row.task_id = v.task_id AND row.task_id = ANY(%(ids)b)
    AND (v.reason <> '{NODE_DISABLED}' OR %(version)s::bigint IS NULL OR EXISTS (
        SELECT FROM scheduling_configuration WHERE id = 1 AND version = %(version)s AND changed_at = %(changed_at)s
    ))"""
SETTLE_BATCH = f"""
WITH v AS MATERIALIZED (
    SELECT v.*, d.*
    FROM unnest(%(ids)b::uuid[], %(numbers)b::int[]) AS v(task_id, decision),
        unnest(%(states)b::text[], %(reasons)b::text[], %(due)b::timestamptz[], %(paused_by)b::text[],
               %(frees)b::bool[], %(types)b::text[], %(templates)b::bigint[], %(versions)b::int[],
               %(counts)b::bool[], %(verdicts)b::text[]::jsonb[])
            WITH ORDINALITY AS d(state, reason, due_at, paused_by, frees_slot, content_type, template_id,
                                 template_version, counts, verdict, number)
    WHERE d.number = v.decision
), {_compose_settling(_BATCH_MATCHED, _BATCH_CHANGES)}
SELECT (SELECT count(*) FROM kept) + (SELECT count(*) FROM moved)
"""

_SETTLE_CHANGES = {
    "state": "v.state",
    "reason": "v.reason",
    "paused_by": "v.paused_by",
    "lease_until": "NULL::timestamptz",
    "wakeups": "0",
    "due_at": "COALESCE(v.due_at, row.due_at)",
    "settled_at": _SETTLED_AT,
    "reserved_at": f"CASE WHEN {_KEEPS_SLOT} THEN row.reserved_at END",
    "verdicts": _ADD_VERDICT,
    "attempts": "CASE WHEN v.attempt IS NULL THEN row.attempts ELSE COALESCE(row.attempts, '[]') || v.attempt END",
}
_SETTLE_MATCHED = """row.task_id = v.task_id AND row.task_id = ANY(%(ids)b)
    AND COALESCE(row.state, '') = 'running' AND row.lease_no = v.lease_no"""
SETTLE = f"""
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)b::uuid[], %(lease_nos)b::int[], %(states)b::text[], %(reasons)b::text[],
                         %(due)b::timestamptz[], %(paused_by)b::text[], %(frees)b::bool[],
                         %(verdicts)b::text[]::jsonb[], %(attempts)b::text[]::jsonb[])
        AS v(task_id, lease_no, state, reason, due_at, paused_by, frees_slot, verdict, attempt)
), {_compose_settling(_SETTLE_MATCHED, _SETTLE_CHANGES)}
SELECT task_id, lease_no FROM kept UNION ALL SELECT task_id, lease_no FROM moved
"""

# A cancelled retry releases its cap slot, unless an attempt may have had its effect.
_CANCEL_CHANGES = {
    "state": "'cancelled'",
    "reason": "%(reason)s",
    "paused_by": "''",
    "lease_until": "NULL::timestamptz",
    "settled_at": "clock_timestamp()",
    "reserved_at": f"CASE WHEN row.reserved_at IS NOT NULL AND {IN_DOUBT} THEN row.reserved_at END",
}
CANCEL = f"""
WITH locked AS MATERIALIZED ({{locked}}), moved AS (
    DELETE FROM scheduling_touch_live AS row WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM locked))
    RETURNING {_compose_moved(_CANCEL_CHANGES)}, row.state <> 'running' AND row.reason = 'quota'
        AND row.due_at < row.expires_at - interval '1 second' AS has_quota_slot -- later: it waits without a slot
), ended AS (
    INSERT INTO scheduling_touch_ended ({", ".join(_COLUMNS)}) SELECT {", ".join(_COLUMNS)} FROM moved
)
SELECT has_quota_slot, task_id, node_id, customer_id, chat_id, priority, due_at FROM moved
"""
