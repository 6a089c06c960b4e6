"""Authenticate API keys, check their scopes and limit their rates.

Keys are cached for `CACHE_SECONDS` seconds. Rates are leased from Redis in slices; while Redis is unavailable, requests
are not limited.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import structlog
from django.conf import settings
from django.http import HttpRequest
from ninja.security.http import HttpAuthBase

from scheduling.api.errors import Problem
from scheduling.api.threads import in_auth_thread
from scheduling.models import ApiKey, expand_scopes
from scheduling.operations.commands import digest_api_key
from scheduling.operations.failed_tasks import Actor
from scheduling.redis_client import RedisError, connect_redis

log = structlog.get_logger(__name__)


T = TypeVar("T")

CACHE_SECONDS = 3.0  #: seconds that a looked-up key stays cached
CACHED_KEYS = 1_000
CACHED_UNKNOWN_KEYS = 10_000  #: digests of unknown keys; bounded, because a client can invent them
LONGEST_KEY = 200


@dataclass(frozen=True, slots=True)
class Principal:
    """The row of a valid key."""

    id: int
    name: str
    scopes: frozenset[str]
    rate_per_minute: int | None
    expires_at: datetime | None
    revoked_at: datetime | None

    def is_valid(self) -> bool:
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > datetime.now(UTC))


class ApiKeyCache:
    """Cache keys by digest. `recall` never blocks; `load_key` queries the database."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Principal]] = {}
        self._unknown: dict[str, float] = {}
        self._changing = threading.Lock()

    def get_cached(self, key: str) -> tuple[bool, Principal | None]:
        """Return whether the key is cached, and its row; None if the key is not valid."""
        if not key or len(key) > LONGEST_KEY or not key.isascii():
            return True, None
        digest, now = digest_api_key(key), time.monotonic()
        known = self._known.get(digest)
        if known and known[0] > now:
            return True, known[1] if known[1].is_valid() else None
        return self._unknown.get(digest, 0) > now, None

    def load_key(self, key: str) -> Principal | None:
        """Query the database and cache the result. Raises what the database raises."""
        digest = digest_api_key(key)
        row = ApiKey.objects.filter(digest=digest).first()
        until = time.monotonic() + CACHE_SECONDS
        with self._changing:
            if row is None:
                self._known.pop(digest, None)
                _store_bounded(self._unknown, digest, until, CACHED_UNKNOWN_KEYS)
                return None
            principal = Principal(
                row.pk, row.name, expand_scopes(row.scopes), row.rate_per_minute, row.expires_at, row.revoked_at
            )
            self._unknown.pop(digest, None)
            _store_bounded(self._known, digest, (until, principal), CACHED_KEYS)
        return principal if principal.is_valid() else None

    def invalidate(self) -> None:
        with self._changing:
            self._known.clear()
            self._unknown.clear()


def _store_bounded(store: dict[str, T], digest: str, value: T, limit: int) -> None:
    """Store a value. A full cache drops its oldest entries."""
    store.pop(digest, None)
    while len(store) >= limit:
        del store[next(iter(store))]
    store[digest] = value


api_key_cache = ApiKeyCache()


SCRIPT = Path(__file__).with_name("rates.lua").read_text(encoding="utf-8")
REDIS_RETRY_DELAY = 5.0  #: seconds without a new attempt after Redis did not respond
LARGEST_SLICE = 500


class RateBudget:
    """The part of one key's budget of one kind that this process has leased."""

    def __init__(self, name: str, rates: RateLimits) -> None:
        self._name = name
        self._rates = rates
        self._left = 0
        self._ends = 0.0  #: end of the leased minute, by this process's monotonic clock
        self._spent = False  #: nothing more can be leased this minute
        self._taking = threading.Lock()
        self._leasing = threading.Lock()

    def consume(self, count: int) -> float | None:
        """Consume from the lease.

        Never blocks. Returns the seconds to wait (0: consumed), or None if more must be leased from Redis.
        """
        with self._taking:
            now = time.monotonic()
            if now < self._ends:
                if self._left >= count:
                    self._left -= count
                    return 0
                if self._spent:
                    return self._ends - now
        return 0 if self._rates.is_redis_down() else None

    def lease_and_consume(self, count: int, limit: int) -> float:
        """Lease more from Redis, then consume.

        Returns the seconds to wait, 0 if consumed or if Redis did not respond. Blocks for one round trip, at most
        `TIMEOUTS.redis_rates`.
        """
        with self._leasing:
            if (wait := self.consume(count)) is not None:
                return wait
            asked_at = time.monotonic()
            left = self._left if asked_at < self._ends else 0
            wanted = max(count - left, min(LARGEST_SLICE, limit // 100))
            lease = self._rates.lease(self._name, limit, wanted)
            if lease is None:
                return 0
            granted, milliseconds = lease
            with self._taking:
                if asked_at >= self._ends:
                    self._left = 0
                # Measured from before the request: the minute ends no later here than in Redis.
                self._ends = asked_at + milliseconds / 1000
                self._left += granted
                self._spent = granted < wanted
        wait = self.consume(count)
        return 0 if wait is None else wait


class RateLimits:
    """The budgets of this process."""

    def __init__(self, url: str) -> None:
        self._script = connect_redis(url, timeout=settings.TIMEOUTS.redis_rates).register_script(SCRIPT)
        self._budgets: dict[str, RateBudget] = {}
        self._retry_redis_at = 0.0

    def budget(self, key_id: int, meter: str) -> RateBudget:
        name = f"at:rate:{{{key_id}}}:{meter}"
        return self._budgets.get(name) or self._budgets.setdefault(name, RateBudget(name, self))

    def is_redis_down(self) -> bool:
        return time.monotonic() < self._retry_redis_at

    def lease(self, name: str, limit: int, wanted: int) -> tuple[int, int] | None:
        """Lease up to `wanted`; None if Redis did not respond.

        Returns the granted number and the milliseconds until the minute ends.
        """
        if self.is_redis_down():
            return None
        try:
            granted, milliseconds = self._script(keys=[name], args=[limit, wanted])
        except RedisError as error:
            self._retry_redis_at = time.monotonic() + REDIS_RETRY_DELAY
            log.warning("rates_not_limited", error=str(error), seconds=REDIS_RETRY_DELAY)
            return None
        return int(granted), int(milliseconds)


_rates: RateLimits | None = None
_making = threading.Lock()


def get_rate_limits() -> RateLimits:
    """Return the budgets of this process. Connects to Redis at the first call."""
    global _rates
    with _making:
        if _rates is None:
            _rates = RateLimits(settings.REDIS_URL)
        return _rates


CHALLENGE = 'Bearer realm="aftertouch"'
BATCHED_A_REQUEST = 10  #: events, jobs and so on that a key may send in batches, as a multiple of its request limit
SMALLEST_BATCH_LIMIT = 5_000


class ApiKeyAuth(HttpAuthBase):
    """Admit requests with `Authorization: Bearer <key>` if the key has one of `scopes` and requests left this minute.

    Sets `request.auth` to the `Principal`. On an event loop the call returns an awaitable, in a thread the result.
    Neither costs a query or a round trip while the key and a slice of its budget are cached.
    """

    openapi_scheme = "bearer"
    is_async: bool

    def __init__(self, *scopes: str, charged: bool = True) -> None:
        """Require one of `scopes`.

        With `charged` each admission counts a request; otherwise the view calls `charge_request`.
        """
        super().__init__()
        self.scopes = scopes
        self.charged = charged
        self.is_async = True

    def __call__(self, request: HttpRequest) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._admit(request)
        return self._admit_on_loop(request)

    def _admit(self, request: HttpRequest) -> Principal:
        key = _parse_bearer_key(request.META.get("HTTP_AUTHORIZATION", ""))
        known, principal = api_key_cache.get_cached(key)
        principal = self._check(principal if known else api_key_cache.load_key(key))
        if not self.charged:
            return principal
        _consume_in_thread(*_get_request_budget(principal), 1, "requests")
        return principal

    async def _admit_on_loop(self, request: HttpRequest) -> Principal:
        key = _parse_bearer_key(request.META.get("HTTP_AUTHORIZATION", ""))
        known, principal = api_key_cache.get_cached(key)
        principal = self._check(principal if known else await in_auth_thread(api_key_cache.load_key, key))
        if self.charged:
            await charge_request(principal)
        return principal

    def _check(self, principal: Principal | None) -> Principal:
        if principal is None:
            raise _build_unknown_key_problem()
        if principal.scopes.isdisjoint(self.scopes):
            raise _build_scope_problem(*self.scopes)
        return principal


def get_principal(request: HttpRequest) -> Principal:
    """Return the key of an admitted request."""
    principal: Principal = request.auth  # type: ignore[attr-defined]
    return principal


def require_scope(request: HttpRequest, scope: str) -> None:
    """Check a scope that depends on the row or the body.

    Raises:
        Problem: 403, the key lacks it.
    """
    if scope not in get_principal(request).scopes:
        raise _build_scope_problem(scope)


def build_api_key_actor(request: HttpRequest, reason: str = "") -> Actor:
    """Return the actor that history and logs name for this request: `api:<key name>`."""
    return Actor(name=f"api:{get_principal(request).name}", reason=reason)


async def charge_request(principal: Principal) -> None:
    """Count one request.

    Raises:
        Problem: 429 if the limit of this minute is reached.
    """
    await _consume_on_loop(*_get_request_budget(principal), 1, "requests")


async def charge_events(principal: Principal, count: int) -> None:
    """Count the events of a batch, which is one request.

    Raises:
        Problem: 429 if the limit of this minute is reached.
    """
    await _consume_on_loop(*_get_batch_budget(principal, "events"), count, "events")


def charge_batch(request: HttpRequest, count: int, what: str) -> None:
    """Count the jobs, customers or receipts (`what`) of a batch, which is one request. Call it before they are stored.

    Raises:
        Problem: 429 if the limit of this minute is reached.
    """
    _consume_in_thread(*_get_batch_budget(get_principal(request), what), count, what)


async def admit_body(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check the key before the body is read. The scope and the rate are checked when the operation is known.

    Raises:
        Problem: 401. Whatever the database raises is left to the check of the operation.
    """
    given = next((value for name, value in headers if name == b"authorization"), b"")
    key = _parse_bearer_key(given.decode("latin-1"))
    known, principal = api_key_cache.get_cached(key)
    if not known:
        try:
            principal = await in_auth_thread(api_key_cache.load_key, key)
        except Exception:  # the check of the operation responds with the right status
            return
    if principal is None:
        raise _build_unknown_key_problem()


def _build_scope_problem(*scopes: str) -> Problem:
    return Problem(
        403,
        f"The API key lacks the scope “{'” or “'.join(scopes)}”.",
        headers={"WWW-Authenticate": f'{CHALLENGE}, error="insufficient_scope", scope="{" ".join(scopes)}"'},
    )


def _build_unknown_key_problem() -> Problem:
    return Problem(
        401,
        "The API key is unknown, revoked or expired.",
        headers={"WWW-Authenticate": f'{CHALLENGE}, error="invalid_token"'},
    )


def _parse_bearer_key(given: str) -> str:
    """Return the key of an `Authorization` header.

    Raises:
        Problem: 401 without a bearer key.
    """
    scheme, _, key = given.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Problem(401, "Send an API key: “Authorization: Bearer <key>”.", headers={"WWW-Authenticate": CHALLENGE})
    return str(key.strip())


def _get_request_budget(principal: Principal) -> tuple[RateBudget, int]:
    return get_rate_limits().budget(principal.id, "requests"), _get_request_limit(principal)


def _get_request_limit(principal: Principal) -> int:
    return principal.rate_per_minute or int(settings.AFTERTOUCH_API_RATE_PER_MINUTE)


def _get_batch_budget(principal: Principal, what: str) -> tuple[RateBudget, int]:
    limit = max(SMALLEST_BATCH_LIMIT, _get_request_limit(principal) * BATCHED_A_REQUEST)
    return get_rate_limits().budget(principal.id, what), limit


def _consume_in_thread(budget: RateBudget, limit: int, count: int, what: str) -> None:
    wait = budget.consume(count)
    _refuse_over_limit(budget.lease_and_consume(count, limit) if wait is None else wait, limit, what)


async def _consume_on_loop(budget: RateBudget, limit: int, count: int, what: str) -> None:
    wait = budget.consume(count)
    if wait is None:
        wait = await in_auth_thread(budget.lease_and_consume, count, limit)
    _refuse_over_limit(wait, limit, what)


def _refuse_over_limit(wait: float, limit: int, what: str) -> None:
    if wait:
        raise Problem(429, f"This key may send {limit} {what} a minute.", retry_after=wait)
