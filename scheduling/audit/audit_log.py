"""Store who did what: one row of `AuditEntry` for each action, in the transaction of the action.

A rolled back action leaves no entry. PostgreSQL refuses changes of entries. An erasure alone may empty their texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import Model
from django.http import HttpRequest
from simple_history.models import HistoricalRecords

from scheduling.models import AuditEntry
from scheduling.redaction import redact, redact_text

LONGEST_VALUE = 300  #: characters of a value before or after
MOST_CHANGES = 50

Change = tuple[str, Any, Any]  #: field, value before, value after


def record_action(
    action: str, target: Model | tuple[str, object], *, actor: str, label: str = "", reason: str = "",
    changes: Sequence[Change] = (),
) -> None:  # fmt: skip
    """Store one entry. `target` is a row, or a kind with an id. Secrets and personal numbers are hidden."""
    kind, key = (target._meta.label_lower, target.pk) if isinstance(target, Model) else target
    AuditEntry.objects.create(
        action=action, kind=kind, object_id=str(key)[:100], label=redact_text(label)[:200], actor=actor[:150],
        address=_find_request_address(), reason=redact_text(reason)[:500],
        changes=[[name, *(_redact_value(name, value) for value in values)] for name, *values in changes[:MOST_CHANGES]],
    )  # fmt: skip


def _find_request_address() -> str:
    """Return the address of the request that this thread or task serves; empty outside of requests."""
    request: HttpRequest | None = getattr(HistoricalRecords.context, "request", None)
    return str(request.META.get("REMOTE_ADDR") or "")[:45] if request is not None else ""


def _redact_value(name: str, value: Any) -> str | None:
    if value is None:
        return None
    text = redact({name: value})[name]
    return (text if isinstance(text, str) else str(text))[:LONGEST_VALUE]
