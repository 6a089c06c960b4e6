"""Move ledger rows between states, and lock rows. No other code does.

Every method is one statement. Time is the database's `statement_timestamp()`. A statement that waited for a lock in an
older transaction therefore still sees the present.

States are literals in the SQL, because PostgreSQL uses a partial index only where it can read the condition. Statements
with given ids hide that condition from the planner (`COALESCE(state, '')`). With statistics of an almost empty queue it
would scan the partial index instead of the primary key. Such statements also name their ids as an array where they join
them. After a bulk load that ANALYZE saw before its commit, PostgreSQL takes the table for empty. A join may then read
the whole primary key for each id.

The fence: `claim` increments `lease_no`, and every later write names the number of its claim. Zero rows mean that the
claim is lost. `attempt` is no fence, because a deferral or a manual retry changes it.

All writers lock rows in one global order: customers, communities, nodes, touches. Each table is locked in the order of
its key, so that two writers cannot deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, NamedTuple
from uuid import UUID

from scheduling import sql
from scheduling.models.touch import Priority
from scheduling.policy.profile import Profile, read_profile
from scheduling.policy.specs import CustomerSpec

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
                FROM unnest(%(ids)b::uuid[], %(lease_nos)b::int[], %(states)b::text[], %(reasons)b::text[],
                            %(due)b::timestamptz[], %(paused_by)b::text[])
                    AS v(task_id, lease_no, state, reason, due_at, paused_by)
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

    def move(self, task_ids: Sequence[UUID], due: Sequence[datetime]) -> int:
        """Set a new due time for waiting rows. Return the number of moved rows.

        A wake-up already published for the old time is premature or has no effect.
        """
        return sql.execute(
            f"""
            WITH waiting AS MATERIALIZED (
                SELECT row.task_id, v.due_at
                FROM {self.table} AS row JOIN unnest(%(ids)b::uuid[], %(due)b::timestamptz[]) AS v(task_id, due_at)
                    USING (task_id)
                WHERE row.task_id = ANY(%(ids)b) AND COALESCE(row.state, '') IN ('scheduled', 'queued')
                ORDER BY row.task_id FOR UPDATE OF row
            )
            UPDATE {self.table} AS row
            SET state = 'scheduled', lease_until = NULL, wakeups = 0, due_at = waiting.due_at,
                planned_at = waiting.due_at
            FROM waiting WHERE row.task_id = waiting.task_id AND row.task_id = ANY(%(ids)b)
            """,
            {"ids": list(task_ids), "due": list(due)},
        )

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


# --- locks ------------------------------------------------------------------------------------------------------------


POLL = 0.02  #: seconds
#: The times of a customer's last activity and conversation.
Activity = tuple[datetime | None, datetime | None]


def insert_customers(activity: Mapping[str, Activity]) -> dict[str, int]:
    """Insert users with their activity, except stored ones. Return the ids of the new rows by user id.

    An insert waits for another transaction that inserts the same user. Wait for no lock of a customer after it.
    """
    users = sorted(activity.items())
    rows = sql.rows(
        _INSERT_CUSTOMERS,
        {
            "user_ids": [user_id for user_id, _ in users],
            "active": [active_at for _, (active_at, _) in users],
            "talking": [talking_at for _, (_, talking_at) in users],
        },
    )
    return dict(rows)


def lock_customers(task_ids: Sequence[UUID]) -> dict[int, CustomerSpec]:
    """Lock the customers of these touches in the order of their ids and return them by id."""
    rows = sql.rows(_LOCK_CUSTOMERS, {"ids": sql.UuidArray(task_ids)})
    return {row[0]: CustomerSpec(*row) if row[-1] else CustomerSpec(*row[:-1]) for row in rows}


def await_customer_locks(limit: timedelta) -> bool:
    """Wait until the transactions that lock customers now have ended. Return whether they ended within the limit.

    It locks no row, so that later ones do not wait. Call it outside a transaction.
    """
    ends_at = time.monotonic() + limit.total_seconds()
    left = _list_lockers()
    while left and time.monotonic() < ends_at:
        time.sleep(POLL)
        left &= _list_lockers()
    return not left


def _list_lockers() -> set[str]:
    """Return the virtual ids of other transactions that have locked or changed customers."""
    return {row[0] for row in sql.rows(_LOCKERS, {})}


def load_profiles(customer_ids: Iterable[int]) -> dict[int, Profile]:
    """Return the profiles of those customers that have one. Call it after the lock, and only if one is needed."""
    rows = sql.rows(_PROFILES, {"ids": sorted(set(customer_ids))})
    return {customer_id: read_profile(attributes, tags) for customer_id, attributes, tags in rows}


def lock_users(user_ids: Sequence[str]) -> dict[str, CustomerSpec]:
    """Lock the stored customers with these user ids. Return them by user id."""
    rows = sql.rows(_LOCK_USERS, {"user_ids": user_ids})
    columns = ("id", "user_id", "level", "locale", "timezone", "last_active_at", "conversation_at")
    return {row[1]: CustomerSpec(**dict(zip(columns, row, strict=True))) for row in rows}


def lock_nodes(node_ids: Iterable[int]) -> set[int]:
    """Keep these nodes from deletion until the transaction ends. Return those that exist. Edits do not wait."""
    return {row[0] for row in sql.rows(_LOCK_NODES, {"ids": sorted(node_ids)})}


def lock_remaining(customer_ids: Iterable[int]) -> dict[int, str]:
    """Lock these customers, except erased ones. Return their user ids by id."""
    return dict(sql.rows(_LOCK_REMAINING, {"ids": sorted(set(customer_ids))}))


def lock_free_users(user_ids: Sequence[str]) -> dict[str, int]:
    """Lock those of the customers that no other transaction has locked. Return their ids by user id."""
    return {user_id: key for key, user_id in sql.rows(_LOCK_FREE_USERS, {"user_ids": user_ids})}


def locked_users(user_ids: Iterable[str]) -> set[str]:
    """Return the `user_ids` that another transaction holds locked now. Waits for no lock."""
    return {row[0] for row in sql.rows(_LOCKED_USERS, {"user_ids": sorted(set(user_ids))})}


def lock_inactive(after: timedelta, limit: int) -> list[tuple[int, str, datetime]]:
    """Lock up to `limit` free customers without activity for `after` that are not yet marked inactive.

    Return id, user id and last activity of each. Two scans at once share the work.
    """
    return [tuple(row) for row in sql.rows(_LOCK_INACTIVE, {"after": after, "limit": limit})]


def lock_communities(task_ids: Sequence[UUID]) -> None:
    """Lock the communities of these touches, after the customers. Create missing rows first.

    Needed only while a community cap is active. A row that is deleted while this waits for it is created again.
    """
    locked_all = False
    while not locked_all:
        sql.execute(_INSERT_COMMUNITIES, {"ids": list(task_ids)})
        ((locked_all,),) = sql.rows(_LOCK_COMMUNITIES, {"ids": list(task_ids)})


def delete_personal_chats(event_ids: Sequence[UUID]) -> int:
    """Delete the rows that exist only for the lock of these events' chats. Their ids may name a customer."""
    chats = [row[0] for row in sql.rows(_LOCK_PERSONAL_CHATS, {"events": sql.UuidArray(event_ids)})]
    return sql.execute("DELETE FROM scheduling_community WHERE id = ANY(%(ids)b)", {"ids": chats}) if chats else 0


# A lock of a row holds one of its table until its transaction ends.
_LOCKERS = """
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = 'scheduling_customer'::regclass
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND mode IN ('RowShareLock', 'RowExclusiveLock') AND granted AND pid <> pg_backend_pid()
"""

_INSERT_CUSTOMERS = """
INSERT INTO scheduling_customer (user_id, name, level, locale, timezone, addresses, opted_out, created_at,
    last_active_at, conversation_at)
SELECT u.user_id, '', '', '', '', '{}', false, statement_timestamp(), u.active, u.talking
FROM unnest(%(user_ids)b::text[], %(active)b::timestamptz[], %(talking)b::timestamptz[]) AS u(user_id, active, talking)
ORDER BY u.user_id
ON CONFLICT (user_id) DO NOTHING
RETURNING user_id, id
"""

# A touch that runs now may be waiting again before the claim. Its customer is therefore locked too, and Presence is
# asked about it. No touch is claimed without its customer's lock.
_LOCK_CUSTOMERS = """
SELECT id, user_id, name, level, locale, timezone, opted_out, last_active_at, conversation_at,
       NULLIF(addresses, '{}')
FROM scheduling_customer WHERE id = ANY(ARRAY(
    SELECT customer_id FROM scheduling_touch_live
    WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued', 'running')
))
ORDER BY id FOR NO KEY UPDATE
"""

_PROFILES = """
SELECT customer_id, attributes, tags FROM scheduling_customerprofile WHERE customer_id = ANY(%(ids)b::bigint[])
"""

# A join: if the plan was made while the table was small, `= ANY` would compare each row with each user id.
_LOCK_USERS = """
SELECT c.id, c.user_id, c.level, c.locale, c.timezone, c.last_active_at, c.conversation_at
FROM unnest(%(user_ids)b::text[]) AS u(user_id) JOIN scheduling_customer AS c ON c.user_id = u.user_id
ORDER BY c.id FOR NO KEY UPDATE OF c
"""

_LOCK_REMAINING = """
SELECT id, user_id FROM scheduling_customer WHERE id = ANY(%(ids)b::bigint[]) AND NOT starts_with(user_id, 'erased:')
ORDER BY id FOR NO KEY UPDATE
"""

_LOCK_NODES = "SELECT id FROM scheduling_node WHERE id = ANY(%(ids)b::bigint[]) ORDER BY id FOR KEY SHARE"

_LOCK_FREE_USERS = """
SELECT id, user_id FROM scheduling_customer WHERE user_id = ANY(%(user_ids)b) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
"""

_LOCKED_USERS = """
WITH free AS MATERIALIZED (
    SELECT id FROM scheduling_customer WHERE user_id = ANY(%(user_ids)b) FOR NO KEY UPDATE SKIP LOCKED
)
SELECT user_id FROM scheduling_customer WHERE user_id = ANY(%(user_ids)b) AND id NOT IN (SELECT id FROM free)
"""

_LOCK_INACTIVE = """
WITH inactive AS MATERIALIZED (
    SELECT id FROM scheduling_customer
    WHERE last_active_at IS NOT NULL AND (inactive_since IS NULL OR NOT inactive_since = last_active_at)
      AND last_active_at < statement_timestamp() - %(after)s
    ORDER BY last_active_at LIMIT %(limit)s
)
SELECT id, user_id, last_active_at FROM scheduling_customer
WHERE id IN (SELECT id FROM inactive) AND last_active_at < statement_timestamp() - %(after)s
ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
"""

_INSERT_COMMUNITIES = """
INSERT INTO scheduling_community (chat_id, name, targets)
SELECT DISTINCT t.chat_id, '', '' FROM scheduling_touch_live AS t
WHERE t.task_id = ANY(%(ids)b) AND t.chat_id <> ''
  AND NOT EXISTS (SELECT 1 FROM scheduling_community AS c WHERE c.chat_id = t.chat_id)
ORDER BY t.chat_id
ON CONFLICT (chat_id) DO NOTHING
"""

_LOCK_COMMUNITIES = """
WITH wanted AS MATERIALIZED (
    SELECT DISTINCT chat_id FROM scheduling_touch_live WHERE task_id = ANY(%(ids)b) AND chat_id <> ''
), locked AS MATERIALIZED (
    SELECT id FROM scheduling_community WHERE chat_id IN (SELECT chat_id FROM wanted)
    ORDER BY chat_id FOR NO KEY UPDATE
)
SELECT (SELECT count(*) FROM wanted) = (SELECT count(*) FROM locked)
"""

_LOCK_PERSONAL_CHATS = """
SELECT c.id FROM scheduling_community AS c
WHERE c.chat_id IN (SELECT chat_id FROM scheduling_touch WHERE event_id = ANY(%(events)b))
  AND c.name = '' AND c.targets = '' AND NOT EXISTS (
      SELECT FROM scheduling_alertreceiver AS receiver WHERE receiver.community_id = c.id)
ORDER BY c.chat_id FOR UPDATE OF c
"""
