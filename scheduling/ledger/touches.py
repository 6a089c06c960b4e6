"""Change the states of touches. One write turns a verdict into the touch's state.

Dispatch is by priority and bounded. Workers fetch messages ahead and hold delayed ones in memory. Without a bound, a
hundred thousand touches that are due at one moment delay every touch of a higher priority until they are delivered.
Jobs need no bound, because a shop runs one at a time.

A touch that ends moves to the partition of its end.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import transaction
from django.dispatch import Signal

from scheduling import sql, tracing
from scheduling.ledger.transitions import Claim, Settlement, WakeUp, lock_expired_runs
from scheduling.models import Attempt, Touch, Verdict
from scheduling.models.touch import MOST_VERDICTS, Priority, encode_entry
from scheduling.policy.guards import HOLD, NODE_DISABLED, PAUSED, SUPPRESS, GuardVerdict
from scheduling.policy.send_times import EXPIRY_MARGIN

WAKEUP_LEASE = timedelta(seconds=10)  #: how long past due a published wake-up is trusted; doubles with each wake-up
SLICE = timedelta(milliseconds=250)  #: of the future; what is dispatched ahead is bounded in each
MIN_REPUBLISH_WAIT = timedelta(milliseconds=20)  #: minimum wait before a premature wake-up message is repeated
RECENTLY_DUE = timedelta(seconds=1)  #: longer than the time from a claim to the query for premature wake-ups
AGE_UNKNOWN = datetime.min.replace(tzinfo=UTC)  #: age of the oldest message of a queue that does not show it
#: How long past due a wake-up in such a queue is trusted; doubles with each one, up to half an hour. A lost wake-up
#: therefore does not wait until the queue is empty. An hour's backlog of a million is published four times more, not at
#: each pass.
AGE_UNKNOWN_LEASE = timedelta(minutes=2)


class Sending(NamedTuple):
    """A claimed touch about to be sent, with the conditions that stop it."""

    claim: Claim
    node_id: int
    channel_id: int
    marketing: bool  #: an opt-out stops it
    event_at: datetime | None  #: a later conversation stops it; None: the node ignores conversations


class QuotaSlot(NamedTuple):
    """A quota slot that its touch no longer waits for. The last columns of `CANCEL` and `_RESCHEDULE`."""

    task_id: UUID
    node_id: int
    chat_id: str
    customer_id: int
    priority: int
    at: datetime


quota_slots_freed = Signal()  #: after the commit, with `slots`: of touches that were cancelled or moved


class LockedTouch(NamedTuple):
    """What can change about a due touch, read with its lock."""

    task_id: UUID
    lease_no: int  #: the number that the row gets when the verdict is written
    attempt: int
    priority: int
    due_at: datetime
    expires_at: datetime
    reserved_at: datetime | None
    template_id: int | None


class TouchLedger:
    def dispatch_due(
        self, *, horizon: timedelta = timedelta(0), limit: int = 1000, window: int = 5_000
    ) -> list[WakeUp]:
        """Mark up to `limit` touches due within `horizon` as dispatched, by priority and due time. Return them.

        What is dispatched and not claimed is bounded for each priority: `window` touches that are due, and half as many
        in each `SLICE` of the future, which workers hold in memory. Other touches wait in the table, where a backlog of
        one priority delays no other. Not counted are touches that intake dispatched at once, and wake-ups that may be
        lost: those that fell due more than `WAKEUP_LEASE` ago, and the third and later ones of a touch.

        Safe to run concurrently on any node: only one caller gets a row. Callers at the same moment may exceed a bound
        by one window each.
        """
        parameters = {
            "slices": -(-horizon // SLICE),
            "slice": SLICE,
            "limit": limit,
            "priorities": Priority.values,
            "window": window,
            "slice_window": window // 2,
            "lease": WAKEUP_LEASE,
        }
        return [WakeUp(*row) for row in sql.rows(_DISPATCH_DUE, parameters)]

    def seconds_until_due(self, horizon: timedelta) -> float | None:
        """Return the seconds until a touch that is not dispatched falls due; None if no touch does within `horizon`."""
        return sql.rows(_NEXT_DUE, {"priorities": Priority.values, "horizon": horizon})[0][0]  # type: ignore[no-any-return]

    def has_expired_wakeups(self) -> bool:
        """Return whether a dispatched touch has an expired lease. If not, the caller need not ask the broker."""
        return bool(sql.rows(_EXPIRED_WAKEUP, {}))

    def requeue_expired(self, *, trusted_since: dict[int, datetime], limit: int = 1000) -> int:
        """Return rows whose wake-up message was lost to `scheduled`. Return their number.

        A wake-up that was published after the oldest message of its queue may still wait there. Such rows stay
        unchanged: their leases count from the publication of that message, not from now. A backlog costs no writes.

        Args:
            trusted_since: by priority, publication time of the oldest message in that queue. `AGE_UNKNOWN`: messages of
                unknown age wait; a wake-up is then trusted for `AGE_UNKNOWN_LEASE`.
            limit: rows per priority and statement.
        """
        since = [trusted_since.get(priority) for priority in Priority.values]
        return sql.execute(
            _REQUEUE_EXPIRED,
            {
                "limit": limit,
                "priorities": Priority.values,
                "since": [None if each == AGE_UNKNOWN else each for each in since],
                "unseen": [each == AGE_UNKNOWN for each in since],
                "unseen_lease": AGE_UNKNOWN_LEASE,
            },
        )

    def premature_wakeups(self, task_ids: Sequence[UUID]) -> list[WakeUp]:
        """Return dispatched rows of `task_ids` whose wake-up message arrived before they were due.

        Publish their messages again. The returned `due_at` is by this node's clock, which was ahead. With the
        database's time the messages would return at once, repeatedly, until the rows are due.

        Rows that fell due since the claim are included: otherwise they would wait until their lease expires. A row that
        another worker has just claimed may be included; its second message then has no effect.
        """
        here = datetime.now(UTC)
        parameters = {"ids": list(task_ids), "here": here, "moment": MIN_REPUBLISH_WAIT, "since": RECENTLY_DUE}
        return [WakeUp(*row) for row in sql.rows(_PREMATURE_WAKEUPS, parameters)]

    def lock_due(self, task_ids: Sequence[UUID]) -> tuple[list[LockedTouch], datetime | None]:
        """Lock the due, waiting and unlocked touches among `task_ids`. Return them and the time of the lock.

        The time is PostgreSQL's; None if nothing is due.

        The rows stay unchanged until `write_decisions` writes claim and verdict in one update. Each write of a row
        costs as much as all other work on it. Until then the lock is the claim.
        """
        rows = sql.rows(_LOCK_DUE, {"ids": list(task_ids)})
        return [LockedTouch._make(row[:8]) for row in rows], rows[0][8] if rows else None

    def write_decisions(
        self,
        decisions: Mapping[Settlement, Sequence[UUID]],
        *,
        at: datetime,
        lease: timedelta,
        version: tuple[int, datetime] | None = None,
    ) -> int:
        """Claim these touches and write their states and verdicts in one statement, each row once.

        Call it in the transaction whose `lock_due` locked them at `at`. A cap slot of an earlier attempt
        keeps its time. `version` is the configuration version of the verdicts. If another one is valid now, touches
        whose node is off stay unchanged. Return how many were written.
        """
        task_ids = [task_id for task_ids in decisions.values() for task_id in task_ids]
        contents = [each.content for each in decisions]
        written = sql.rows(
            WRITE_DECISIONS,
            {
                "at": at,
                "lease": lease,
                "version": version and version[0],
                "changed_at": version and version[1],
                "ids": list(task_ids),
                "numbers": [number for number, each in enumerate(decisions.values(), 1) for _ in each],
                **_settlement_columns(decisions, at),
                "types": [each and each.content_type for each in contents],
                "templates": [each and each.template_id for each in contents],
                "versions": [each and each.template_version for each in contents],
                "counts": [each and each.counts for each in contents],
            },
        )
        return int(written[0][0])

    def settle(
        self,
        settlements: Mapping[Claim, Settlement],
        *,
        attempts: Mapping[Claim, Attempt] | None = None,
    ) -> set[Claim]:
        """End these runs and add their attempts and verdicts. Return the claims that were still valid.

        Discard the results of the others: their claims are lost.
        """
        if not settlements:
            return set()
        attempts = attempts or {}
        at = sql.now() if any(each.verdict for each in settlements.values()) else None
        return {
            Claim(*row)
            for row in sql.rows(
                SETTLE,
                {
                    "ids": [claim.task_id for claim in settlements],
                    "lease_nos": [claim.lease_no for claim in settlements],
                    **_settlement_columns(settlements.values(), at),
                    "attempts": [
                        json.dumps([encode_entry(attempts[claim])]) if claim in attempts else None
                        for claim in settlements
                    ],
                },
            )
        }

    def expired_runs(self, *, limit: int = 500) -> list[tuple[Claim, bool]]:
        return lock_expired_runs("scheduling_touch_live", limit=limit)

    def defer(self, deferred: Mapping[UUID, Settlement]) -> None:
        """Give locked touches the reason and due time of a deferral, one write per row. They are not claimed.

        Call it in the transaction whose `lock_due` locked them.
        """
        sql.execute(
            _DEFER,
            {
                "ids": list(deferred),
                "reasons": [each.reason for each in deferred.values()],
                "due": [each.due_at for each in deferred.values()],
            },
        )

    def mark_sending(
        self, sendings: Sequence[Sending], *, margin: timedelta = timedelta(0)
    ) -> dict[UUID, GuardVerdict | None]:
        """Mark touches as sending. Only those mapped to None in the result may be sent.

        A verdict names a change that was committed before this statement and forbids the touch. Touches are missing
        if their claim is lost, their lease ends within `margin`, or another transaction has locked the row. The
        statement waits for no lock. All data it reads is therefore from one instant, `sending_at`.
        """
        ways = {(each.node_id, each.channel_id): 0 for each in sendings}
        for number, way in enumerate(ways, 1):
            ways[way] = number
        rows = sql.rows(
            _MARK_SENDING,
            {
                "ids": [each.claim.task_id for each in sendings],
                "lease_nos": [each.claim.lease_no for each in sendings],
                "ways": [ways[each.node_id, each.channel_id] for each in sendings],
                "marketing": [each.marketing for each in sendings],
                "event_ats": [each.event_at for each in sendings],
                "nodes": [node_id for node_id, _ in ways],
                "channels": [channel_id for _, channel_id in ways],
                "margin": margin,
            },
        )
        return {task_id: _verdict_for_stop(*stop) if stop[0] else None for task_id, *stop in rows}

    def cancel(self, task_ids: Sequence[UUID], *, reason: str, wait: bool = True) -> set[UUID]:
        """Cancel touches that are not marked as sending, claimed ones included. Return their ids.

        A worker cannot mark a cancelled touch as sending. A cancelled retry releases its cap slot, unless an attempt
        may have had its effect.

        `wait=False` skips claimed touches whose row another transaction has locked. Callers that hold locks on other
        touches need it: settling locks touches in any order.
        """
        locked = _CANCELLABLE if wait else _CANCELLABLE_AT_ONCE
        rows = sql.rows(CANCEL.format(locked=locked), {"ids": list(task_ids), "reason": reason[:64]})
        cancelled = {task_id for _, task_id, *_ in rows}
        _free_quota_slots(rows)
        if cancelled:
            names = [tracing.trace_label(None, task_id) for task_id in cancelled]
            transaction.on_commit(
                lambda: tracing.log_touches("touches_settled", names, state="cancelled", reason=reason)
            )
        return cancelled

    def resume_paused(self, scope: str, *, spread: timedelta, limit: int = 5000) -> int:
        """Resume up to `limit` touches that `scope` had paused. Return their number.

        Overdue touches are spread evenly over `spread`, but not beyond `EXPIRY_MARGIN` before they expire.
        """
        given = {"scope": scope, "spread": spread, "margin": EXPIRY_MARGIN, "limit": limit}
        return sql.execute(_RESUME_PAUSED, given)

    def paused_scopes(self) -> list[str]:
        """Return the scopes that pause touches."""
        return [row[0] for row in sql.rows(_PAUSED_SCOPES, {})]

    def reschedule(self, task_ids: Sequence[UUID], due: Sequence[datetime], *, expires_after: timedelta) -> int:
        """Set new due times for waiting touches that no attempt was made for, and the times at which they expire.

        Return their number. A touch that was tried since keeps the due time of its retry. A wake-up already
        published for the old time is premature or has no effect. A quota slot at the old time is given back.
        """
        rows = sql.rows(_RESCHEDULE, {"ids": list(task_ids), "due": list(due), "expires_after": expires_after})
        _free_quota_slots(rows)
        return len(rows)

    def with_unknown_outcome(self, task_ids: Sequence[UUID]) -> set[UUID]:
        """Return the touches whose earlier attempt, or whose republished touch, has an unknown outcome."""
        asked = f"SELECT task_id FROM scheduling_touch_live AS row WHERE task_id = ANY(%(ids)b) AND {IN_DOUBT}"
        return {row[0] for row in sql.rows(asked, {"ids": list(task_ids)}, replan=True)}

    def release_cap_slot(self, task_id: UUID) -> None:
        """Release the cap slot of an unknown touch that was not delivered or is republished under the same key."""
        sql.execute("UPDATE scheduling_touch_ended SET reserved_at = NULL WHERE task_id = %(id)s", {"id": task_id})


def _verdict_for_stop(stop: str, scope: str, node_version: int, conversation_at: datetime) -> GuardVerdict:
    match stop:
        case "paused":
            return GuardVerdict(HOLD, PAUSED, observed=scope)
        case "opted_out":
            return GuardVerdict(SUPPRESS, "opted_out", observed="marketing")
        case "conversation":
            return GuardVerdict(SUPPRESS, "conversation", observed=f"{conversation_at:%Y-%m-%dT%H:%M:%S.%f%z}")
        case _:
            return GuardVerdict(SUPPRESS, stop, node_version)


def _settlement_columns(settlements: Collection[Settlement], at: datetime | None) -> dict[str, list[Any]]:
    """Return the columns that both statements set. `at` is the time of the verdicts."""
    return {
        "states": [each.state for each in settlements],
        "reasons": [each.reason[:64] for each in settlements],
        "due": [each.due_at for each in settlements],
        "paused_by": [each.paused_by for each in settlements],
        "frees": [each.releases_cap_slot for each in settlements],
        "verdicts": [_format_verdict(each.verdict, at) if at and each.verdict else None for each in settlements],
    }


def _format_verdict(verdict: GuardVerdict, at: datetime) -> str:
    """Return the stored form of a verdict, as a list of one."""
    entry = Verdict(
        at, verdict.decision, verdict.rule, verdict.rule_version, verdict.observed[:200], verdict.limit[:200],
        verdict.next_eligible_at,
    )  # fmt: skip
    return json.dumps([encode_entry(entry)])


# Slice 0 holds what is due. A first wake-up that is due has a lease of at most twice WAKEUP_LEASE from now: the count
# needs no other leases in a pass that looks at slice 0 only. The order makes the index by lease the cheapest one, also
# where the statistics were made of an empty table.
_DISPATCH_DUE = """
WITH dispatched AS MATERIALIZED (
    SELECT priority, count(*) AS size,
           CASE WHEN due_at <= statement_timestamp() THEN 0  -- most of a backlog; the quotient is of type numeric, slow
                ELSE ceil(extract(epoch FROM due_at - statement_timestamp()) / extract(epoch FROM %(slice)s)) END
               AS number
    FROM (
        SELECT priority, due_at FROM scheduling_touch_live
        WHERE state IN ('queued', 'running') AND COALESCE(state, '') = 'queued'
          AND GREATEST(due_at, queued_at) > statement_timestamp() - %(lease)s AND queued_at > created_at
          AND lease_until > statement_timestamp()
          AND lease_until < statement_timestamp() + 2 * %(lease)s + %(slices)s * %(slice)s
        ORDER BY lease_until LIMIT 10000000
    ) AS queued
    GROUP BY priority, number
), slice AS (
    SELECT priority, number, (CASE number WHEN 0 THEN %(window)s ELSE %(slice_window)s END) - COALESCE(size, 0) AS room,
           CASE number WHEN 0 THEN '-infinity' ELSE statement_timestamp() + (number - 1) * %(slice)s END AS after
    FROM generate_series(0, %(slices)s::int) AS number CROSS JOIN unnest(%(priorities)b::int[]) AS priority
    LEFT JOIN dispatched USING (priority, number)
    ORDER BY number, priority
), due AS MATERIALIZED (
    SELECT touch.task_id FROM slice CROSS JOIN LATERAL (
        SELECT task_id FROM scheduling_touch_live
        WHERE state = 'scheduled' AND paused_by = '' AND priority = slice.priority
          AND due_at > slice.after AND due_at <= statement_timestamp() + slice.number * %(slice)s
        ORDER BY due_at LIMIT GREATEST(slice.room, 0)
        FOR UPDATE SKIP LOCKED
    ) AS touch
    LIMIT %(limit)s
)
UPDATE scheduling_touch_live AS row
SET state = 'queued', queued_at = statement_timestamp(), wakeups = LEAST(row.wakeups + 1, 30),
    lease_until = GREATEST(row.due_at, statement_timestamp()) + %(lease)s * power(2, LEAST(row.wakeups, 6))
WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM due))
RETURNING row.task_id, row.due_at, row.priority, row.node_id
"""

_NEXT_DUE = """
SELECT extract(epoch FROM min(touch.due_at) - statement_timestamp())::float8
FROM unnest(%(priorities)b::int[]) AS p(priority) CROSS JOIN LATERAL (
    SELECT due_at FROM scheduling_touch_live
    WHERE state = 'scheduled' AND paused_by = '' AND priority = p.priority
      AND due_at <= statement_timestamp() + %(horizon)s
    ORDER BY due_at LIMIT 1
) AS touch
"""

_EXPIRED_WAKEUP = """
SELECT 1 FROM scheduling_touch_live
WHERE state IN ('queued', 'running') AND COALESCE(state, '') = 'queued' AND lease_until < statement_timestamp()
ORDER BY lease_until LIMIT 1
"""

_REQUEUE_EXPIRED = """
WITH lost AS MATERIALIZED (
    SELECT row.task_id
    FROM unnest(%(priorities)b::int[], %(since)b::timestamptz[], %(unseen)b::bool[]) AS queue(priority, since, unseen)
    CROSS JOIN LATERAL (
        SELECT task_id FROM scheduling_touch_live AS row
        WHERE state IN ('queued', 'running') AND COALESCE(state, '') = 'queued' AND row.priority = queue.priority
          AND lease_until < LEAST(statement_timestamp(), queue.since)
          AND (NOT queue.unseen
               OR GREATEST(due_at, queued_at) + %(unseen_lease)s * power(2, GREATEST(LEAST(wakeups, 5), 1) - 1)
                  <= statement_timestamp())
        ORDER BY lease_until LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) AS row
)
UPDATE scheduling_touch_live AS row SET state = 'scheduled', lease_until = NULL
WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM lost))
"""

_PREMATURE_WAKEUPS = """
SELECT task_id, %(here)b::timestamptz + GREATEST(due_at - statement_timestamp(), %(moment)s), priority, node_id
FROM scheduling_touch_live
WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') = 'queued' AND due_at > statement_timestamp() - %(since)s
"""

# The statement waits for no lock, so it needs no lock order.
_LOCK_DUE = """
SELECT task_id, lease_no + 1, attempt, priority, due_at, expires_at, reserved_at, template_id, statement_timestamp()
FROM scheduling_touch_live
WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued') AND COALESCE(paused_by, '') = ''
  AND due_at <= statement_timestamp()
FOR NO KEY UPDATE SKIP LOCKED
"""

_DEFER = f"""
UPDATE scheduling_touch_live AS row
SET state = 'scheduled', reason = v.reason, due_at = v.due_at, wakeups = 0, lease_until = NULL
FROM {sql.parallel_rows(ids="uuid", reasons="text", due="timestamptz")} AS v(task_id, reason, due_at)
WHERE row.task_id = v.task_id AND row.task_id = ANY(%(ids)b)
"""

_RESUME_PAUSED = """
WITH paused AS MATERIALIZED (
    SELECT task_id FROM scheduling_touch_live WHERE paused_by = %(scope)s AND paused_by <> ''
    LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
UPDATE scheduling_touch_live AS row
SET paused_by = '', reason = '',
    due_at = GREATEST(
        row.due_at,
        LEAST(statement_timestamp() + random() * %(spread)s, row.expires_at - %(margin)s)
    )
WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM paused))
"""

# Skips through the index: touches may be a million, scopes are few.
_PAUSED_SCOPES = """
WITH RECURSIVE scopes(scope) AS (
    (SELECT paused_by FROM scheduling_touch_live WHERE paused_by <> '' ORDER BY paused_by LIMIT 1)
    UNION ALL
    SELECT (
        SELECT paused_by FROM scheduling_touch_live WHERE paused_by <> '' AND paused_by > scope
        ORDER BY paused_by LIMIT 1
    )
    FROM scopes WHERE scope IS NOT NULL
)
SELECT scope FROM scopes WHERE scope IS NOT NULL
"""

# A touch that waits until its expiry has no slot.
_QUOTA_SLOT = """row.state <> 'running' AND row.reason = 'quota' AND row.due_at < row.expires_at - interval '1 second'
        AS has_quota_slot"""
_QUOTA_SLOT_COLUMNS = "has_quota_slot, task_id, node_id, chat_id, customer_id, priority, due_at"

# `COALESCE` hides from the planner that the index of an event's touches has those that repeat none.
_RESCHEDULE = f"""
WITH waiting AS MATERIALIZED (
    SELECT task_id, node_id, chat_id, customer_id, priority, due_at, {_QUOTA_SLOT}
    FROM scheduling_touch_live AS row
    WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued')
      AND attempt = 0 AND COALESCE(retry_of, task_id) = task_id AND reserved_at IS NULL
    ORDER BY task_id FOR UPDATE
), moved AS (
    UPDATE scheduling_touch_live AS row
    SET state = 'scheduled', lease_until = NULL, wakeups = 0, due_at = v.due_at, planned_at = v.due_at,
        expires_at = v.due_at + %(expires_after)s, reason = CASE WHEN row.paused_by = '' THEN '' ELSE row.reason END
    FROM {sql.parallel_rows(ids="uuid", due="timestamptz")} AS v(task_id, due_at)
    WHERE row.task_id = v.task_id AND row.task_id = ANY(ARRAY(SELECT task_id FROM waiting))
)
SELECT {_QUOTA_SLOT_COLUMNS} FROM waiting
"""

_CANCELLABLE = """
    SELECT task_id FROM scheduling_touch_live
    WHERE task_id = ANY(%(ids)b)
      AND (COALESCE(state, '') IN ('scheduled', 'queued') OR (COALESCE(state, '') = 'running' AND sending_at IS NULL))
    ORDER BY task_id FOR UPDATE
"""

# No waiting touch can start to run here: a claim needs the customer's lock, which the caller holds.
_CANCELLABLE_AT_ONCE = """
    SELECT task_id FROM (
        SELECT task_id FROM scheduling_touch_live
        WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued')
        ORDER BY task_id FOR UPDATE
    ) AS waiting
    UNION ALL
    SELECT task_id FROM (
        SELECT task_id FROM scheduling_touch_live
        WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') = 'running' AND sending_at IS NULL
        FOR UPDATE SKIP LOCKED
    ) AS running
"""

# A row that another transaction has locked is skipped. After a wait PostgreSQL reads only that row again. The customer
# and the pauses joined with it would be as of before the wait.
_MARK_SENDING = f"""
WITH mine AS MATERIALIZED (
    SELECT t.task_id, t.customer_id, v.way, v.marketing, v.event_at
    FROM {sql.parallel_rows(ids="uuid", lease_nos="int", ways="int", marketing="bool", event_ats="timestamptz")}
        AS v(task_id, lease_no, way, marketing, event_at)
    JOIN scheduling_touch_live AS t ON t.task_id = v.task_id
    WHERE t.task_id = ANY(%(ids)b) AND COALESCE(t.state, '') = 'running' AND t.lease_no = v.lease_no
      AND t.sending_at IS NULL
      AND t.lease_until > statement_timestamp() + %(margin)s
    FOR NO KEY UPDATE OF t SKIP LOCKED
), way AS MATERIALIZED (
    SELECT w.number, node.version, pause.scope,
           CASE WHEN NOT node.enabled OR node.retired_at IS NOT NULL THEN 'node_disabled'
                WHEN pause.scope IS NOT NULL THEN 'paused'
                WHEN channel.retired_at IS NOT NULL THEN 'channel_retired' END AS stop
    FROM unnest(%(nodes)b::bigint[], %(channels)b::bigint[]) WITH ORDINALITY AS w(node_id, channel_id, number)
    JOIN scheduling_node AS node ON node.id = w.node_id
    JOIN scheduling_channelconfig AS channel ON channel.id = w.channel_id
    LEFT JOIN LATERAL (
        SELECT scope FROM scheduling_pause
        WHERE scope IN ('all', 'channel:' || channel.key, 'node:' || node.key) ORDER BY scope LIMIT 1
    ) AS pause ON true
), judged AS MATERIALIZED (
    SELECT mine.task_id, way.scope, way.version, customer.conversation_at,
           COALESCE(way.stop, CASE WHEN mine.marketing AND customer.opted_out THEN 'opted_out'
                                   WHEN customer.conversation_at > mine.event_at THEN 'conversation' END) AS stop
    FROM mine
    JOIN way ON way.number = mine.way
    JOIN scheduling_customer AS customer ON customer.id = mine.customer_id
), marked AS (
    UPDATE scheduling_touch_live AS row SET sending_at = statement_timestamp(), attempt = row.attempt + 1
    WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM judged WHERE stop IS NULL))
)
SELECT task_id, stop, scope, version, conversation_at FROM judged
"""

touch_ledger = TouchLedger()


def _free_quota_slots(rows: Sequence[tuple[Any, ...]]) -> None:
    if freed := [QuotaSlot(*slot) for has_quota_slot, *slot in rows if has_quota_slot]:
        transaction.on_commit(lambda: quota_slots_freed.send_robust(TouchLedger, slots=freed))


# --- statements that settle -------------------------------------------------------------------------------------------


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
    WHERE {matched} AND NOT v.ends
    RETURNING row.task_id, row.lease_no
), moved AS (
    DELETE FROM scheduling_touch_live AS row USING v
    WHERE {matched} AND v.ends
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
_SETTLED_AT = "CASE WHEN v.ends THEN clock_timestamp() END"

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
WRITE_DECISIONS = f"""
WITH v AS MATERIALIZED (
    SELECT v.task_id, d.*, d.state NOT IN ('scheduled', 'running') AS ends
    FROM {sql.parallel_rows(ids="uuid", numbers="int")} AS v(task_id, decision)
    LEFT JOIN unnest(%(states)b::text[], %(reasons)b::text[], %(due)b::timestamptz[], %(paused_by)b::text[],
                     %(frees)b::bool[], %(types)b::text[], %(templates)b::bigint[], %(versions)b::int[],
                     %(counts)b::bool[], %(verdicts)b::text[]::jsonb[])
        WITH ORDINALITY AS d(state, reason, due_at, paused_by, frees_slot, content_type, template_id,
                             template_version, counts, verdict, number)
        ON d.number = v.decision
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
    # Marked as sending, but not tried: its process had no connection, or the answer of the mark was lost. It uses up no
    # retry.
    "attempt": "row.attempt - (v.attempt IS NULL AND row.sending_at IS NOT NULL)::int",
    "attempts": "CASE WHEN v.attempt IS NULL THEN row.attempts ELSE COALESCE(row.attempts, '[]') || v.attempt END",
}
_SETTLE_MATCHED = """row.task_id = v.task_id AND row.task_id = ANY(%(ids)b)
    AND COALESCE(row.state, '') = 'running' AND row.lease_no = v.lease_no"""
_SETTLED_ROWS = sql.parallel_rows(
    ids="uuid", lease_nos="int", states="text", reasons="text", due="timestamptz", paused_by="text", frees="bool",
    verdicts="text", attempts="text",
)  # fmt: skip
SETTLE = f"""
WITH v AS MATERIALIZED (
    SELECT task_id, lease_no, state, reason, due_at, paused_by, frees_slot, verdict::jsonb, attempt::jsonb,
           state NOT IN ('scheduled', 'running') AS ends
    FROM {_SETTLED_ROWS} AS v(task_id, lease_no, state, reason, due_at, paused_by, frees_slot, verdict, attempt)
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
    RETURNING {_compose_moved(_CANCEL_CHANGES)}, {_QUOTA_SLOT}
), ended AS (
    INSERT INTO scheduling_touch_ended ({", ".join(_COLUMNS)}) SELECT {", ".join(_COLUMNS)} FROM moved
)
SELECT {_QUOTA_SLOT_COLUMNS} FROM moved
"""
