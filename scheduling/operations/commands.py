"""Write operations of users and clients: customers, cancellation, pauses, API keys.

Events are in `planning.ingest`, failed tasks in `failed_tasks`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib.auth.models import User
from django.db import transaction
from django.utils.timezone import now

from scheduling.errors import Conflict, InvalidInput, NotFound
from scheduling.ledger.touches import touches
from scheduling.models import WAITING, ApiKey, ChannelConfig, Customer, Node, Pause, Scope, Touch


def update_customer(user_id: str, changes: Mapping[str, Any]) -> Customer:
    """Create the customer or change the named fields. A change of `opted_out` also stores its time."""
    with transaction.atomic():
        Customer.objects.bulk_create([Customer(user_id=user_id)], ignore_conflicts=True)
        customer = Customer.objects.select_for_update(no_key=True).get(user_id=user_id)
        for name, value in changes.items():
            setattr(customer, name, value)
        if "opted_out" in changes:
            customer.opted_out_at = (customer.opted_out_at or now()) if changes["opted_out"] else None
        customer.save()
    return customer


def cancel_one_touch(task_id: UUID, *, actor: str, wait: bool = True) -> None:
    """Cancel a touch that is not marked as sending, also while a worker holds it.

    A caller that holds locks of other touches passes `wait=False`. A running touch that another transaction has locked
    then does not change.

    Raises:
        NotFound: there is no such touch.
        Conflict: the touch is being sent, has ended or is locked.
    """
    state = None
    for _ in range(2):  # between the two statements a worker may return the touch for a retry
        with transaction.atomic():
            if touches.cancel([task_id], reason=f"by:{actor}", wait=wait):
                return
        state = Touch.objects.filter(pk=task_id).values_list("state", flat=True).first()
        if state not in WAITING:
            break
    if state is None:
        raise NotFound(f"There is no touch {task_id}.")
    raise Conflict(f"The touch is {state} already.")


def pause_scope(scope: str, *, reason: str = "", user: User | None = None) -> Pause:
    """Pause all touches of a scope as they fall due: "all", "channel:<key>" or "node:<key>". Idempotent."""
    _check_scope(scope)
    row, _ = Pause.objects.get_or_create(scope=scope, defaults={"reason": reason[:200], "paused_by": user})
    return row


def resume_scope(scope: str) -> None:
    """End a pause. The next pass spreads its paused touches over the next minutes.

    Raises:
        NotFound: the scope is not paused.
    """
    _check_scope(scope)
    deleted, _ = Pause.objects.filter(scope=scope).delete()
    if not deleted:
        raise NotFound(f"{scope} is not paused.")


def _check_scope(scope: str) -> None:
    kind, _, key = scope.partition(":")
    known: dict[str, type[ChannelConfig] | type[Node]] = {"channel": ChannelConfig, "node": Node}
    if scope == "all":
        return
    if kind not in known:
        raise InvalidInput.of("scope", "“all”, “channel:<key>” or “node:<key>”")
    if not known[kind]._default_manager.filter(key=key).exists():
        raise InvalidInput.of("scope", f"there is no {kind} “{key}”")


def create_api_key(
    name: str, scopes: Sequence[str], *, rate_per_minute: int | None = None, expires_at: datetime | None = None
) -> str:
    """Create a key and return it. It cannot be read again.

    Raises:
        InvalidInput: `scope` or `name` is invalid.
    """
    unknown = sorted(set(scopes) - set(Scope.values))
    if unknown or not scopes:
        raise InvalidInput.of("scope", f"{', '.join(unknown) or 'none given'}; available: {', '.join(Scope.values)}")
    if not name or ApiKey.objects.filter(name=name).exists():
        raise InvalidInput.of("name", f"a key named “{name}” already exists" if name else "must be given")
    key = f"at_{secrets.token_urlsafe(32)}"
    ApiKey.objects.create(
        name=name,
        digest=digest_api_key(key),
        prefix=key[:8],
        scopes=sorted(set(scopes)),
        rate_per_minute=rate_per_minute,
        expires_at=expires_at,
    )
    return key


def digest_api_key(key: str) -> str:
    """Return the SHA-256 digest of a key.

    256 random bits need no slow hash. A slow one would cost more than storing the event.
    """
    return hashlib.sha256(key.encode()).hexdigest()
