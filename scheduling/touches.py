"""The ledger of touches, and the one write that a verdict to send adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
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
    delivered: bool  #: its channel calls nobody: it is delivered with the same write


class TouchLedger(Ledger):
    def reserve(self, reservations: Sequence[Reservation], *, at: datetime) -> None:
        """Take the slots at `at`, an instant of the database's clock; a slot kept from an earlier attempt stays where
        it was. Only inside the transaction that holds the claims and the customers' locks."""
        sql.count(
            f"""
            UPDATE {self.table} AS row
            SET reserved_at = COALESCE(row.reserved_at, %(at)s), content_type = v.content_type,
                template_id = v.template_id, template_version = v.template_version, counts_toward_cap = v.counts,
                state = CASE WHEN v.delivered THEN 'delivered' ELSE row.state END,
                reason = CASE WHEN v.delivered THEN '' ELSE row.reason END,
                lease_until = CASE WHEN v.delivered THEN NULL ELSE row.lease_until END,
                sending_at = CASE WHEN v.delivered THEN %(at)s END,
                settled_at = CASE WHEN v.delivered THEN statement_timestamp() END,
                attempt = row.attempt + v.delivered::int
            FROM unnest(%(ids)b::uuid[], %(lease_nos)b::int[], %(types)b::text[], %(templates)b::bigint[],
                        %(versions)b::int[], %(counts)b::bool[], %(delivered)b::bool[])
                AS v(task_id, lease_no, content_type, template_id, template_version, counts, delivered)
            WHERE row.task_id = v.task_id AND row.state = 'running' AND row.lease_no = v.lease_no
            """,
            {
                "at": at,
                "ids": [each.claim.task_id for each in reservations],
                "lease_nos": [each.claim.lease_no for each in reservations],
                "types": [each.content_type for each in reservations],
                "templates": [each.template_id for each in reservations],
                "versions": [each.template_version for each in reservations],
                "counts": [each.counts for each in reservations],
                "delivered": [each.delivered for each in reservations],
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
