"""Create failed tasks for what a person must handle.

That of a touch keeps the event and every attempt. It is stored in the transaction that ends the touch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from scheduling.models import FailedTask, Touch
from scheduling.strict_text import storable_text


def record_failed_touches(task_ids: Sequence[UUID], *, details: Mapping[UUID, str] | None = None) -> None:
    """Create a failed task for each of these touches, which have just ended `failed` or `unknown`.

    Idempotent: an existing failed task stays unchanged. `details` adds text for touches that failed before any attempt.
    """
    if not task_ids:
        return
    rows = Touch.objects.filter(task_id__in=task_ids).select_related("event", "node__channel", "customer")
    FailedTask.objects.bulk_create(
        [_failed_task_for(row, (details or {}).get(row.task_id, "")) for row in rows], ignore_conflicts=True
    )


def _failed_task_for(row: Touch, detail: str) -> FailedTask:
    attempts = [
        {
            "number": attempt.number,
            "started_at": attempt.started_at.isoformat(),
            "outcome": attempt.outcome,
            "reason": attempt.reason,
            "detail": attempt.detail,
            "status": attempt.status,
        }
        for attempt in row.attempts
    ]
    detail = detail or (str(attempts[-1]["detail"]) if attempts else "")
    return FailedTask(
        origin=FailedTask.Origin.TOUCH,
        task_id=row.task_id,
        root_id=row.root_id,
        failure="unknown" if row.state == "unknown" else "failed",
        reason=row.reason,
        detail=detail,
        payload={
            "node": row.node.key,
            "user_id": row.customer.user_id,
            "chat_id": row.chat_id,
            "event": {
                "source": row.event.source,
                "id": row.event.event_id,
                "type": row.event.type,
                "data": row.event.data,
            },
            "planned_at": row.planned_at.isoformat(),
        },
        attempts=attempts,
        channel=row.node.channel.key,
        fingerprint=failure_fingerprint("touch", row.node.channel.key, row.reason, detail),
    )


def record_unreadable_message(reason: str, body: Any, *, detail: str = "", queue: str = "") -> None:
    """Create a failed task for a broker message that cannot be read or run.

    Not idempotent: the same message again adds a row with the same fingerprint. The message is cut at 20,000
    characters.
    """
    text = storable_text(body if isinstance(body, str) else repr(body))[:20_000]
    FailedTask.objects.create(
        origin=FailedTask.Origin.MESSAGE,
        failure="unreadable",
        reason=reason[:64],
        detail=detail[:2_000],
        payload={"message": text},
        channel=queue[:64],
        fingerprint=failure_fingerprint("message", queue, reason, detail),
    )


def failure_fingerprint(*parts: str) -> str:
    """Return the same digest for failures whose last part differs only in numbers, ids and addresses."""
    detail = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|0x[0-9a-f]+|\d+", "#", parts[-1].lower())
    normal = "\n".join([*parts[:-1], detail])
    return hashlib.sha256(normal[:2_000].encode()).hexdigest()[:32]
