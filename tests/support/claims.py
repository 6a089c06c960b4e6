"""Claim touches as a worker does, without its judgement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from django.db import transaction

from scheduling.ledger.touches import touch_ledger
from scheduling.ledger.transitions import Claim, Settlement
from scheduling.models import Touch

LEASE = timedelta(seconds=45)


def claim_touches(task_ids: Sequence[UUID], *, lease: timedelta = LEASE) -> list[Claim]:
    """Claim those that are due, waiting and not locked. Without a verdict they take no cap slot."""
    with transaction.atomic():
        locked, at = touch_ledger.lock_due(task_ids)
        if at is not None:
            decisions = {Settlement("running"): [row.task_id for row in locked]}
            touch_ledger.write_decisions(decisions, at=at, lease=lease)
            Touch.objects.filter(pk__in=[row.task_id for row in locked if not row.reserved_at]).update(reserved_at=None)
    return [Claim(row.task_id, row.lease_no) for row in locked]
