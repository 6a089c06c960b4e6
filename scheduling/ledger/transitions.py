"""What the ledgers of touches and of jobs share. Only these two change the state of a row.

Time is the database's `statement_timestamp()`. A statement that waited for a lock in an older transaction therefore
still sees the present.

States are literals in the SQL, because PostgreSQL uses a partial index only where it can read the condition. Statements
with given ids hide that condition from the planner (`COALESCE(state, '')`). With statistics of an almost empty queue it
would scan the partial index instead of the primary key. Such statements also name their ids as an array where they join
them. After a bulk load that ANALYZE saw before its commit, PostgreSQL takes the table for empty. A join may then read
the whole primary key for each id.

The fence: a claim increments `lease_no`, and every later write names the number of its claim. Zero rows mean that the
claim is lost. `attempt` is no fence, because a deferral or a manual retry changes it.

The ledger of touches (`scheduling.ledger.touches`) claims a whole batch with its verdicts. That of jobs
(`rpa_tasks.jobs.ledger`) picks one job together with its shop's lane.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from scheduling import sql
from scheduling.policy.guards import GuardVerdict


class WakeUp(NamedTuple):
    """A dispatched row, for which a message is worth publishing."""

    task_id: UUID
    due_at: datetime
    priority: int
    owner: int  #: the node of a touch, the shop of a job


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
    verdict: GuardVerdict | None = None  #: added to those of the touch


def lock_expired_runs(table: str, *, limit: int) -> list[tuple[Claim, bool]]:
    """Lock and return claims with an expired lease, each with whether sending had started.

    Call it in a transaction and settle the claims before it ends.
    """
    rows = sql.rows(
        f"""
        SELECT task_id, lease_no, sending_at IS NOT NULL FROM {table}
        WHERE state IN ('queued', 'running') AND state = 'running' AND lease_until < statement_timestamp()
        ORDER BY lease_until LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
        """,
        {"limit": limit},
    )
    return [(Claim(task_id, lease_no), sent) for task_id, lease_no, sent in rows]
