"""Move ledger rows between states. Only `Ledger` and its two subclasses, of touches and of jobs, do.

Every method is one statement. Time is the database's `statement_timestamp()`. A statement that waited for a lock in an
older transaction therefore still sees the present.

States are literals in the SQL, because PostgreSQL uses a partial index only where it can read the condition. Statements
with given ids hide that condition from the planner (`COALESCE(state, '')`). With statistics of an almost empty queue it
would scan the partial index instead of the primary key. Such statements also name their ids as an array where they join
them. After a bulk load that ANALYZE saw before its commit, PostgreSQL takes the table for empty. A join may then read
the whole primary key for each id.

The fence: a claim increments `lease_no`, and every later write names the number of its claim. Zero rows mean that the
claim is lost. `attempt` is no fence, because a deferral or a manual retry changes it.

Touches and jobs have a ledger each. That of touches replaces `dispatch_due`, `settle` and `cancel`, and claims a whole
batch with its verdicts (`TouchLedger.write_decisions`). That of jobs adds the pick (`rpa_tasks.jobs.ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, NamedTuple
from uuid import UUID

from scheduling import sql
from scheduling.models.touch import Priority

MIN_REPUBLISH_WAIT = timedelta(milliseconds=20)  #: minimum wait before a premature wake-up message is repeated
RECENTLY_DUE = timedelta(seconds=1)  #: longer than the time from a claim to the query for premature wake-ups
WAKEUP_LEASE = timedelta(seconds=10)  #: how long past due a published wake-up is trusted; doubles with each wake-up
AGE_UNKNOWN = datetime.min.replace(tzinfo=UTC)  #: age of the oldest message of a queue that does not show it
#: How long past due a wake-up in such a queue is trusted; doubles with each one, up to half an hour. A lost wake-up
#: therefore does not wait until the queue is empty. An hour's backlog of a million is published four times more, not at
#: each pass.
AGE_UNKNOWN_LEASE = timedelta(minutes=2)


class WakeUp(NamedTuple):
    """A dispatched row, for which a message is worth publishing."""

    task_id: UUID
    due_at: datetime
    priority: int
    route: Any  #: what the ledger's owner needs to choose a queue (a touch: its node)


class Claim(NamedTuple):
    """A claimed row and the fence number of every write about it."""

    task_id: UUID
    lease_no: int


class Content(NamedTuple):
    """The content of a touch. Only a touch that is sent takes a cap slot."""

    content_type: str
    template_id: int
    template_version: int
    counts: bool  #: whether it counts toward the cap


class Settlement(NamedTuple):
    """The state that a verdict or the end of a run gives to rows.

    It names no row, because most touches of a batch share a few settlements. State `scheduled` with a `due_at` is a
    deferral or a retry. Only a verdict gives `running`: the touch goes to the sender.
    """

    state: str
    reason: str = ""
    due_at: datetime | None = None
    paused_by: str = ""
    releases_cap_slot: bool = False  #: certainly not delivered, so it releases its cap slot
    content: Content | None = None  #: given by a verdict


class Ledger:
    """The state changes of one table of ledger rows."""

    latest_resumption: ClassVar[str] = "'infinity'"  #: due time of a resumed row at the latest, in SQL

    def __init__(self, table: str, *, route: str) -> None:
        """Set the table, and the column `route` for choosing a queue."""
        self.table = table
        self.route = route

    # --- scheduled → queued -------------------------------------------------------------------------------------

    def dispatch_due(self, *, horizon: timedelta, limit: int = 1000) -> list[WakeUp]:
        """Mark up to `limit` rows due within `horizon` as dispatched and return them for publishing.

        Safe to run concurrently on any node: only one caller gets a row.
        """
        return fetch_wakeups(
            f"""
            WITH due AS MATERIALIZED (
                SELECT task_id FROM {self.table}
                WHERE state = 'scheduled' AND paused_by = '' AND due_at <= statement_timestamp() + %(horizon)s
                ORDER BY due_at LIMIT %(limit)s
                FOR UPDATE SKIP LOCKED
            )
            UPDATE {self.table} AS row
            SET state = 'queued', queued_at = statement_timestamp(), wakeups = LEAST(row.wakeups + 1, 30),
                lease_until = GREATEST(row.due_at, statement_timestamp()) + %(lease)s * power(2, LEAST(row.wakeups, 6))
            WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM due))
            RETURNING row.task_id, row.due_at, row.priority, row.{self.route}
            """,
            {"horizon": horizon, "limit": limit, "lease": WAKEUP_LEASE},
        )

    def has_expired_wakeups(self) -> bool:
        """Return whether a dispatched row has an expired lease. If not, the caller need not ask the broker."""
        statement = f"""
            SELECT 1 FROM {self.table}
            WHERE state IN ('queued', 'running') AND COALESCE(state, '') = 'queued'
              AND lease_until < statement_timestamp()
            ORDER BY lease_until LIMIT 1
            """
        return bool(sql.rows(statement, {}))

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
            _REQUEUE_EXPIRED.format(table=self.table),
            {
                "limit": limit,
                "priorities": Priority.values,
                "since": [None if each == AGE_UNKNOWN else each for each in since],
                "unseen": [each == AGE_UNKNOWN for each in since],
                "unseen_lease": AGE_UNKNOWN_LEASE,
            },
        )

    # --- queued → running ---------------------------------------------------------------------------------------

    def claim(self, task_ids: Sequence[UUID], *, lease: timedelta) -> list[Claim]:
        """Claim those of `task_ids` that are due, waiting and not locked. Other rows stay unchanged."""
        return [
            Claim(*row)
            for row in sql.rows(
                f"""
                WITH mine AS MATERIALIZED (
                    SELECT task_id FROM {self.table}
                    WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued')
                      AND COALESCE(paused_by, '') = '' AND due_at <= statement_timestamp()
                    ORDER BY task_id
                    FOR UPDATE SKIP LOCKED
                )
                UPDATE {self.table} AS row
                SET state = 'running', lease_no = row.lease_no + 1, sending_at = NULL,
                    lease_until = statement_timestamp() + %(lease)s
                WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM mine))
                RETURNING row.task_id, row.lease_no
                """,
                {"ids": list(task_ids), "lease": lease},
            )
        ]

    def premature_wakeups(self, task_ids: Sequence[UUID]) -> list[WakeUp]:
        """Return dispatched rows of `task_ids` whose wake-up message arrived before they were due.

        Publish their messages again. The returned `due_at` is by this node's clock, which was ahead. With the
        database's time the messages would return at once, repeatedly, until the rows are due.

        Rows that fell due since the claim are included: otherwise they would wait until their lease expires. A row that
        another worker has just claimed may be included; its second message then has no effect.
        """
        return fetch_wakeups(
            f"""
            SELECT task_id, %(here)b::timestamptz + GREATEST(due_at - statement_timestamp(), %(moment)s), priority,
                   {self.route}
            FROM {self.table}
            WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') = 'queued'
              AND due_at > statement_timestamp() - %(since)s
            """,
            {"ids": list(task_ids), "here": datetime.now(UTC), "moment": MIN_REPUBLISH_WAIT, "since": RECENTLY_DUE},
        )

    def renew(self, claim: Claim, *, lease: timedelta) -> bool:
        """Extend the lease of a claim. Return False if the claim is lost; the caller must then stop."""
        return (
            sql.execute(
                f"""
            UPDATE {self.table} SET lease_until = statement_timestamp() + %(lease)s
            WHERE task_id = %(id)s AND COALESCE(state, '') = 'running' AND lease_no = %(lease_no)s
            """,
                {"id": claim.task_id, "lease_no": claim.lease_no, "lease": lease},
            )
            == 1
        )

    # --- running → anywhere -------------------------------------------------------------------------------------

    def settle(self, settlements: Mapping[Claim, Settlement]) -> set[Claim]:
        """End these runs. Return the claims that were still valid.

        Discard the results of the others: their claims are lost.
        """
        if not settlements:
            return set()
        ends = settlements.values()
        return {
            Claim(*row)
            for row in sql.rows(
                f"""
                UPDATE {self.table} AS row
                SET state = v.state, reason = v.reason, paused_by = v.paused_by, lease_until = NULL, wakeups = 0,
                    due_at = COALESCE(v.due_at, row.due_at),
                    settled_at = CASE WHEN v.state <> 'scheduled' THEN statement_timestamp() END
                FROM {_SETTLED_ROWS} AS v(task_id, lease_no, state, reason, due_at, paused_by)
                WHERE row.task_id = ANY(%(ids)b) AND row.task_id = v.task_id
                  AND COALESCE(row.state, '') = 'running' AND row.lease_no = v.lease_no
                RETURNING row.task_id, row.lease_no
                """,
                {
                    "ids": [claim.task_id for claim in settlements],
                    "lease_nos": [claim.lease_no for claim in settlements],
                    "states": [each.state for each in ends],
                    "reasons": [each.reason[:64] for each in ends],
                    "due": [each.due_at for each in ends],
                    "paused_by": [each.paused_by for each in ends],
                },
            )
        }

    def expired_runs(self, *, limit: int = 500) -> list[tuple[Claim, bool]]:
        """Lock and return claims with an expired lease, each with whether sending had started.

        Call it in a transaction and settle the claims before it ends.
        """
        return [
            (Claim(task_id, lease_no), sent)
            for task_id, lease_no, sent in sql.rows(
                f"""
                SELECT task_id, lease_no, sending_at IS NOT NULL FROM {self.table}
                WHERE state IN ('queued', 'running') AND state = 'running' AND lease_until < statement_timestamp()
                ORDER BY lease_until LIMIT %(limit)s
                FOR UPDATE SKIP LOCKED
                """,
                {"limit": limit},
            )
        ]

    # --- waiting rows -------------------------------------------------------------------------------------------

    def cancel(self, task_ids: Sequence[UUID], *, reason: str) -> set[UUID]:
        """Cancel rows that do not run yet. Return the ids of the cancelled rows."""
        return self._cancel(
            f"""
            SELECT task_id FROM {self.table}
            WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued')
            ORDER BY task_id FOR UPDATE
            """,
            task_ids,
            reason,
        )

    def _cancel(self, locked: str, task_ids: Sequence[UUID], reason: str) -> set[UUID]:
        """Cancel the rows that the query `locked` selects and locks."""
        return {
            row[0]
            for row in sql.rows(
                f"""
                WITH locked AS MATERIALIZED ({locked})
                UPDATE {self.table} AS row
                SET state = 'cancelled', reason = %(reason)s, paused_by = '', lease_until = NULL,
                    settled_at = statement_timestamp()
                WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM locked))
                RETURNING row.task_id
                """,
                {"ids": list(task_ids), "reason": reason[:64]},
            )
        }

    def resume_paused(self, scope: str, *, spread: timedelta, limit: int = 5000) -> int:
        """Resume up to `limit` rows that `scope` had paused. Return their number.

        Overdue rows are spread evenly over `spread`, up to `latest_resumption`.
        """
        return sql.execute(
            f"""
            WITH paused AS MATERIALIZED (
                SELECT task_id FROM {self.table} WHERE paused_by = %(scope)s AND paused_by <> ''
                LIMIT %(limit)s FOR UPDATE SKIP LOCKED
            )
            UPDATE {self.table} AS row
            SET paused_by = '', reason = '',
                due_at = GREATEST(
                    row.due_at, LEAST(statement_timestamp() + random() * %(spread)s, {self.latest_resumption})
                )
            WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM paused))
            """,
            {"scope": scope, "spread": spread, "limit": limit},
        )

    def paused_scopes(self) -> list[str]:
        """Return the scopes that pause rows.

        Skips through the index: rows may be a million, scopes are few.
        """
        rows = sql.rows(
            f"""
            WITH RECURSIVE scopes(scope) AS (
                (SELECT paused_by FROM {self.table} WHERE paused_by <> '' ORDER BY paused_by LIMIT 1)
                UNION ALL
                SELECT (
                    SELECT paused_by FROM {self.table} WHERE paused_by <> '' AND paused_by > scope
                    ORDER BY paused_by LIMIT 1
                )
                FROM scopes WHERE scope IS NOT NULL
            )
            SELECT scope FROM scopes WHERE scope IS NOT NULL
            """,
            {},
        )
        return [row[0] for row in rows]


def fetch_wakeups(statement: str, parameters: dict[str, Any]) -> list[WakeUp]:
    """Run a statement that returns id, due time, priority and route of rows."""
    return [WakeUp(*row) for row in sql.rows(statement, parameters)]


_SETTLED_ROWS = sql.parallel_rows(
    ids="uuid", lease_nos="int", states="text", reasons="text", due="timestamptz", paused_by="text"
)  # fmt: skip

_REQUEUE_EXPIRED = """
WITH lost AS MATERIALIZED (
    SELECT row.task_id
    FROM unnest(%(priorities)b::int[], %(since)b::timestamptz[], %(unseen)b::bool[]) AS queue(priority, since, unseen)
    CROSS JOIN LATERAL (
        SELECT task_id FROM {table} AS row
        WHERE state IN ('queued', 'running') AND COALESCE(state, '') = 'queued' AND row.priority = queue.priority
          AND lease_until < LEAST(statement_timestamp(), queue.since)
          AND (NOT queue.unseen
               OR GREATEST(due_at, queued_at) + %(unseen_lease)s * power(2, GREATEST(LEAST(wakeups, 5), 1) - 1)
                  <= statement_timestamp())
        ORDER BY lease_until LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) AS row
)
UPDATE {table} AS row SET state = 'scheduled', lease_until = NULL
WHERE row.task_id = ANY(ARRAY(SELECT task_id FROM lost))
"""
