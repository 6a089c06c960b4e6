"""The door: an API key, its scope and its rate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from ninja.security.http import HttpAuthBase

from scheduling.api.errors import Problem
from scheduling.api.keys import Principal, key_ring
from scheduling.api.rates import Budget, rates
from scheduling.api.threads import in_door_thread
from scheduling.operations.failed_tasks import Actor

CHALLENGE = 'Bearer realm="aftertouch"'
EVENTS_A_REQUEST = 10  #: a key may send this many times its requests in events, by sending batches
SMALLEST_EVENT_LIMIT = 5_000


class ApiKeyAuth(HttpAuthBase):
    """`Authorization: Bearer <key>` with a key that has `scope` and has requests left this minute.

    On an event loop it answers with an awaitable, in a thread at once; neither costs a query or a round trip where
    the key and a slice of its budget are at hand. `request.auth` is then the `Principal`.
    """

    openapi_scheme = "bearer"
    is_async: bool

    def __init__(self, scope: str, *, charged: bool = True) -> None:
        """`charged`: admitting counts the request. Without it the view does, by `charge_request`."""
        super().__init__()
        self.scope = scope
        self.charged = charged
        self.is_async = True

    def __call__(self, request: HttpRequest) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._admit(request)
        return self._admit_on_loop(request)

    def _admit(self, request: HttpRequest) -> Principal:
        key = _key(request.META.get("HTTP_AUTHORIZATION", ""))
        known, principal = key_ring.recall(key)
        principal = self._check(principal if known else key_ring.look_up(key))
        if not self.charged:
            return principal
        budget, limit = _requests_of(principal)
        wait = budget.take(1)
        _refuse_if(budget.lease_and_take(1, limit) if wait is None else wait, limit, "requests")
        return principal

    async def _admit_on_loop(self, request: HttpRequest) -> Principal:
        key = _key(request.META.get("HTTP_AUTHORIZATION", ""))
        known, principal = key_ring.recall(key)
        principal = self._check(principal if known else await in_door_thread(key_ring.look_up, key))
        if self.charged:
            await charge_request(principal)
        return principal

    def _check(self, principal: Principal | None) -> Principal:
        if principal is None:
            raise _unknown_key()
        if self.scope not in principal.scopes:
            raise Problem(
                403,
                f"The API key lacks the scope “{self.scope}”.",
                headers={"WWW-Authenticate": f'{CHALLENGE}, error="insufficient_scope", scope="{self.scope}"'},
            )
        return principal


def principal_of(request: HttpRequest) -> Principal:
    """Whose key the request came with, after it was let in."""
    principal: Principal = request.auth  # type: ignore[attr-defined]
    return principal


def actor_of(request: HttpRequest, reason: str = "") -> Actor:
    return Actor(name=f"api:{principal_of(request).name}", reason=reason)


async def charge_request(principal: Principal) -> None:
    """Count one request. Raises a `Problem` where the minute has no room for it."""
    budget, limit = _requests_of(principal)
    await _take(budget, 1, limit, "requests")


async def charge_events(principal: Principal, count: int) -> None:
    """Count the events of a batch, which is one request. Raises a `Problem` where the minute has no room for them."""
    limit = max(SMALLEST_EVENT_LIMIT, _rate(principal) * EVENTS_A_REQUEST)
    await _take(rates().budget(principal.id, "events"), count, limit, "events")


async def admit_body(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check the key before the body is read. The scope and the rate are checked when the operation is known.

    Raises:
        Problem: 401. Whatever the database raises is left to the check of the operation.
    """
    given = next((value for name, value in headers if name == b"authorization"), b"")
    key = _key(given.decode("latin-1"))
    known, principal = key_ring.recall(key)
    if not known:
        try:
            principal = await in_door_thread(key_ring.look_up, key)
        except Exception:  # the operation's own check answers with the right status
            return
    if principal is None:
        raise _unknown_key()


def _unknown_key() -> Problem:
    return Problem(
        401,
        "The API key is unknown, revoked or expired.",
        headers={"WWW-Authenticate": f'{CHALLENGE}, error="invalid_token"'},
    )


def _key(given: str) -> str:
    """The key of an `Authorization` header."""
    scheme, _, key = given.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Problem(401, "Send an API key: “Authorization: Bearer <key>”.", headers={"WWW-Authenticate": CHALLENGE})
    return str(key.strip())


def _requests_of(principal: Principal) -> tuple[Budget, int]:
    return rates().budget(principal.id, "requests"), _rate(principal)


def _rate(principal: Principal) -> int:
    return principal.rate_per_minute or int(settings.AFTERTOUCH_API_RATE_PER_MINUTE)


async def _take(budget: Budget, count: int, limit: int, what: str) -> None:
    wait = budget.take(count)
    if wait is None:
        wait = await in_door_thread(budget.lease_and_take, count, limit)
    _refuse_if(wait, limit, what)


def _refuse_if(wait: float, limit: int, what: str) -> None:
    if wait:
        raise Problem(429, f"This key may send {limit} {what} a minute.", retry_after=wait)
