"""The front door for writes by people and machines, besides events (`intake`) and failed tasks (`failed_tasks`)."""

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


def put_customer(user_id: str, changes: Mapping[str, Any]) -> Customer:
    """Create the customer or change what is named; what is not named stays. `opted_out` notes when."""
    with transaction.atomic():
        Customer.objects.bulk_create([Customer(user_id=user_id)], ignore_conflicts=True)
        customer = Customer.objects.select_for_update(no_key=True).get(user_id=user_id)
        for name, value in changes.items():
            setattr(customer, name, value)
        if "opted_out" in changes:
            customer.opted_out_at = (customer.opted_out_at or now()) if changes["opted_out"] else None
        customer.save()
    return customer


def cancel_touch(task_id: UUID, *, actor: str, wait: bool = True) -> None:
    """Cancel a touch that is not marked as sending yet, also where a worker has it. A caller that holds locks of other
    touches passes `wait=False`: a running touch that another transaction has locked is left as it is.

    Raises `NotFound`, or `Conflict` where it is being sent, has ended or is locked.
    """
    state = None
    for _ in range(2):  # between the two statements a worker may have returned the touch to wait for a retry
        with transaction.atomic():
            if touches.cancel([task_id], reason=f"by:{actor}", wait=wait):
                return
        state = Touch.objects.filter(pk=task_id).values_list("state", flat=True).first()
        if state not in WAITING:
            break
    if state is None:
        raise NotFound(f"There is no touch {task_id}.")
    raise Conflict(f"The touch is {state} already.")


def pause(scope: str, *, reason: str = "", user: User | None = None) -> Pause:
    """Park everything of this scope as it falls due: "all", "channel:<key>" or "node:<key>"."""
    _check_scope(scope)
    row, _ = Pause.objects.get_or_create(scope=scope, defaults={"reason": reason[:200], "paused_by": user})
    return row


def resume(scope: str) -> None:
    """End a pause; the next pass spreads what it had parked over the next minutes. Raises `NotFound`."""
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
    """Make a key and return it: the only time it can be read. Raises `InvalidInput` naming `scope` or `name`."""
    unknown = sorted(set(scopes) - set(Scope.values))
    if unknown or not scopes:
        raise InvalidInput.of("scope", f"{', '.join(unknown) or 'none given'}; there are {', '.join(Scope.values)}")
    if not name or ApiKey.objects.filter(name=name).exists():
        raise InvalidInput.of("name", f"there is a key “{name}” already" if name else "must be given")
    key = f"at_{secrets.token_urlsafe(32)}"
    ApiKey.objects.create(
        name=name,
        digest=digest_of(key),
        prefix=key[:8],
        scopes=sorted(set(scopes)),
        rate_per_minute=rate_per_minute,
        expires_at=expires_at,
    )
    return key


def digest_of(key: str) -> str:
    """256 random bits need no slow hash, and a slow one would cost more than the event."""
    return hashlib.sha256(key.encode()).hexdigest()
