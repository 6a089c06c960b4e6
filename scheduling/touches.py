"""The ledger of touches, and the one write that a verdict to send adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from scheduling import sql
from scheduling.ledger import Claim, Ledger
from scheduling.models import Touch


@dataclass(frozen=True, slots=True)
class Reservation:
    """A verdict to send: the slot it takes and the content that was chosen."""

    claim: Claim
    content_type: str
    template_id: int
    template_version: int
    counts: bool
    sends_now: bool  #: the outside is called in the same breath, so it is marked as sending with the same write


class TouchLedger(Ledger):
    def reserve(self, reservations: Sequence[Reservation]) -> None:
        """Take the slots, by the database's clock. A slot kept from an earlier attempt stays where it was. Only
        inside the transaction that holds the claims and the customers' locks, so that nothing can have moved."""
        sql.count(
            f"""
            UPDATE {self.table} AS row
            SET reserved_at = COALESCE(row.reserved_at, statement_timestamp()), content_type = v.content_type,
                template_id = v.template_id, template_version = v.template_version, counts_toward_cap = v.counts,
                sending_at = CASE WHEN v.sends_now THEN statement_timestamp() END,
                attempt = row.attempt + v.sends_now::int
            FROM unnest(%(ids)b::uuid[], %(lease_nos)b::int[], %(types)b::text[], %(templates)b::bigint[],
                        %(versions)b::int[], %(counts)b::bool[], %(now)b::bool[])
                AS v(task_id, lease_no, content_type, template_id, template_version, counts, sends_now)
            WHERE row.task_id = v.task_id AND row.state = 'running' AND row.lease_no = v.lease_no
            """,
            {
                "ids": [each.claim.task_id for each in reservations],
                "lease_nos": [each.claim.lease_no for each in reservations],
                "types": [each.content_type for each in reservations],
                "templates": [each.template_id for each in reservations],
                "versions": [each.template_version for each in reservations],
                "counts": [each.counts for each in reservations],
                "now": [each.sends_now for each in reservations],
            },
        )

    def cancel(self, task_ids: Sequence[UUID], *, reason: str) -> set[UUID]:
        """What waited for a retry gives its slot back, unless an attempt may have had its effect."""
        cancelled = super().cancel(task_ids, reason=reason)
        if cancelled:
            sql.count(
                f"""
                UPDATE {self.table} AS row SET reserved_at = NULL
                WHERE task_id = ANY(%(ids)b) AND reserved_at IS NOT NULL AND NOT EXISTS (
                    SELECT FROM scheduling_attempt AS a WHERE a.touch_id = row.task_id AND a.outcome = 'unknown'
                )
                """,
                {"ids": list(cancelled)},
            )
        return cancelled

    def free_slot(self, task_id: UUID) -> None:
        """A person found out that an unknown one was not delivered, or publishes it again under the same key."""
        sql.count(f"UPDATE {self.table} SET reserved_at = NULL WHERE task_id = %(id)s", {"id": task_id})


touches = TouchLedger(Touch, route="node_id", frees="reserved_at")
