"""The ledger of touches, and the one write by which a verdict becomes their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction

from scheduling import sql, trail
from scheduling.ledger import Ledger
from scheduling.models import Touch


@dataclass(frozen=True, slots=True)
class Content:
    """What a touch says, or would have said: only what is sent takes a slot of its customer."""

    content_type: str
    template_id: int
    template_version: int
    counts: bool  #: toward the cap


@dataclass(frozen=True, slots=True)
class Decision:
    """What a verdict makes of a touch. It names none, because most touches of a batch share a few of them.

    `running` is for the sender. `delivered` by the same write are those whose channel calls nobody.
    """

    state: str
    reason: str = ""
    due_at: datetime | None = None
    parked: str = ""
    frees_slot: bool = False  #: it certainly was not delivered, so it does not count
    content: Content | None = None


class TouchLedger(Ledger):
    def decide(self, decisions: Mapping[Decision, Sequence[UUID]], *, at: datetime, lease: timedelta) -> None:
        """Claim these touches and write what becomes of them, in one write of each row. Only inside the transaction
        whose `history.lock_due` locked them at `at`; a slot kept from an earlier attempt stays where it was."""
        contents = [each.content for each in decisions]
        sql.count(
            f"""
            UPDATE {self.table} AS row
            SET lease_no = row.lease_no + 1, hints = 0,
                state = d.state, reason = d.reason, parked = d.parked, due_at = COALESCE(d.due_at, row.due_at),
                lease_until = CASE WHEN d.state = 'running' THEN %(at)s + %(lease)s END,
                sending_at = CASE WHEN d.state = 'delivered' THEN %(at)s END,
                attempt = row.attempt + (d.state = 'delivered')::int,
                settled_at = CASE WHEN d.state NOT IN ('scheduled', 'running') THEN statement_timestamp() END,
                reserved_at = CASE WHEN d.state IN ('running', 'delivered') THEN COALESCE(row.reserved_at, %(at)s)
                                   WHEN NOT d.frees_slot THEN row.reserved_at END,
                content_type = COALESCE(d.content_type, row.content_type),
                template_id = COALESCE(d.template_id, row.template_id),
                template_version = COALESCE(d.template_version, row.template_version),
                counts_toward_cap = COALESCE(d.counts, row.counts_toward_cap)
            FROM unnest(%(ids)b::uuid[], %(numbers)b::int[]) AS v(task_id, number),
                unnest(%(states)b::text[], %(reasons)b::text[], %(due)b::timestamptz[], %(parked)b::text[],
                       %(frees)b::bool[], %(types)b::text[], %(templates)b::bigint[], %(versions)b::int[],
                       %(counts)b::bool[])
                WITH ORDINALITY AS d(state, reason, due_at, parked, frees_slot, content_type, template_id,
                                     template_version, counts, number)
            WHERE d.number = v.number AND row.task_id = v.task_id
            """,
            {
                "at": at,
                "lease": lease,
                "ids": [task_id for task_ids in decisions.values() for task_id in task_ids],
                "numbers": [number for number, each in enumerate(decisions.values(), 1) for _ in each],
                "states": [each.state for each in decisions],
                "reasons": [each.reason[:64] for each in decisions],
                "due": [each.due_at for each in decisions],
                "parked": [each.parked for each in decisions],
                "frees": [each.frees_slot for each in decisions],
                "types": [each and each.content_type for each in contents],
                "templates": [each and each.template_id for each in contents],
                "versions": [each and each.template_version for each in contents],
                "counts": [each and each.counts for each in contents],
            },
        )

    def cancel(self, task_ids: Sequence[UUID], *, reason: str) -> set[UUID]:
        """What waited for a retry gives its slot back, unless an attempt may have had its effect."""
        cancelled = super().cancel(task_ids, reason=reason)
        if cancelled:
            sql.count(
                f"""
                UPDATE {self.table} AS t SET reserved_at = NULL
                WHERE task_id = ANY(%(ids)b) AND reserved_at IS NOT NULL AND NOT {_IN_DOUBT}
                """,
                {"ids": list(cancelled)},
            )
            names = [trail.name(None, task_id) for task_id in cancelled]
            transaction.on_commit(lambda: trail.say("touches_settled", names, state="cancelled", reason=reason))
        return cancelled

    def in_doubt(self, task_ids: Sequence[UUID]) -> set[UUID]:
        """Those of which an earlier attempt, or the touch that they publish again, may have had its effect."""
        asked = f"SELECT task_id FROM {self.table} AS t WHERE task_id = ANY(%(ids)b) AND {_IN_DOUBT}"
        return {row[0] for row in sql.rows(asked, {"ids": list(task_ids)})}

    def free_slot(self, task_id: UUID) -> None:
        """A person found out that an unknown one was not delivered, or publishes it again under the same key."""
        sql.count(f"UPDATE {self.table} SET reserved_at = NULL WHERE task_id = %(id)s", {"id": task_id})


_IN_DOUBT = """(
    EXISTS (SELECT FROM scheduling_attempt AS a WHERE a.touch_id = t.task_id AND a.outcome = 'unknown')
    OR EXISTS (
        SELECT FROM scheduling_touch AS p
        WHERE p.task_id = t.retry_of AND p.root_id = t.root_id AND p.state = 'unknown'
    )
)"""

touches = TouchLedger(Touch, route="node_id", frees="reserved_at")
