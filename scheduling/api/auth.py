"""Authenticate API keys, check their scopes and limit their rates.

Keys are cached for `CACHE_SECONDS` seconds. Redis counts the rates of each key by the minute. A process takes slices of
a minute, so that most requests cost no round trip. While Redis is unavailable, requests are not limited.

The API's database calls run in threads that keep their connections. Under ASGI, Django uses a new thread for each
request. Its connection ends with it, so each request would cost a login to PostgreSQL.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

import structlog
from django.conf import settings
from django.db import close_old_connections, reset_queries
from django.http import HttpRequest
from ninja.security.http import HttpAuthBase

from scheduling.api.schemas import Problem
from scheduling.models import ApiKey
from scheduling.models.access import digest_api_key
from scheduling.operations.failed_tasks import Actor
from scheduling.redis_client import RedisError, connect_redis

log = structlog.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


# --- threads ----------------------------------------------------------------------------------------------------------


THREADS = 8
AUTH_THREADS = 2  #: for keys and rates: a look-up every few seconds, a lease every few hundred requests

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="api")
#: Events use no other threads, so they must not wait for reading requests.
_auth_threads = ThreadPoolExecutor(AUTH_THREADS, thread_name_prefix="api-auth")


async def in_database_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `function` in a thread that may use the ORM. Cancelling the wait does not stop the function."""
    return await _run_in_pool(_threads, partial(function, *args, **kwargs))


async def _run_in_pool(pool: ThreadPoolExecutor, call: Callable[[], R]) -> R:
    def run() -> R:
        reset_queries()
        close_old_connections()
        try:
            return call()
        finally:
            close_old_connections()

    return await asyncio.get_running_loop().run_in_executor(pool, contextvars.copy_context().run, run)


# --- keys -------------------------------------------------------------------------------------------------------------


CACHE_SECONDS = 3.0  #: seconds that a looked-up key stays cached
CACHED_KEYS = 10_000  #: bounded, because a client can invent keys
LONGEST_KEY = 200


class ApiKeyCache:
    """Cache keys by digest, unknown ones as well. `get_cached` never blocks; `load_key` queries the database."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[float, ApiKey | None]] = {}
        self._changing = threading.Lock()

    def get_cached(self, key: str) -> tuple[bool, ApiKey | None]:
        """Return whether the key is cached, and its row; None if the key is not valid."""
        if not key or len(key) > LONGEST_KEY or not key.isascii():
            return True, None
        until, principal = self._rows.get(digest_api_key(key), (0.0, None))
        return until > time.monotonic(), principal if principal and principal.is_valid() else None

    def load_key(self, key: str) -> ApiKey | None:
        """Query the database and cache the result. Raises what the database raises."""
        digest = digest_api_key(key)
        principal = ApiKey.objects.filter(digest=digest).first()
        with self._changing:
            self._rows.pop(digest, None)
            while len(self._rows) >= CACHED_KEYS:
                del self._rows[next(iter(self._rows))]  # the oldest
            self._rows[digest] = time.monotonic() + CACHE_SECONDS, principal
        return principal if principal and principal.is_valid() else None


api_key_cache = ApiKeyCache()


async def find_principal(key: str) -> ApiKey | None:
    """Return the row of a valid key. Raises what the database raises."""
    known, principal = api_key_cache.get_cached(key)
    return principal if known else await _run_in_pool(_auth_threads, partial(api_key_cache.load_key, key))


# --- rates ------------------------------------------------------------------------------------------------------------


MINUTE = 60  #: seconds
REDIS_RETRY_DELAY = 5.0  #: seconds without a new attempt after Redis did not respond
LARGEST_SLICE = 500


@dataclass(slots=True)
class Slice:
    """What this process has taken of a budget and not yet used."""

    ends: float  #: of its minute, in monotonic seconds of this process
    left: int
    is_last: bool  #: nothing more can be taken this minute


class RateLimits:
    """The budgets of the API keys. A budget is named by the key's id and what it counts: requests, events and so on.

    A minute starts with the first request after the last one, and Redis ends it: no clock of a node counts.
    """

    def __init__(self, url: str) -> None:
        self._redis = connect_redis(url, timeout=settings.TIMEOUTS.redis_rates)
        self._slices: dict[str, Slice] = {}
        self._changing = threading.Lock()
        #: By budget. Held during a round trip: the requests that wait use what it takes.
        self._taking: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._retry_redis_at = 0.0

    def consume(self, budget: str, count: int) -> float | None:
        """Consume from the slice of this process. Never blocks.

        Returns the seconds to wait (0: consumed), or None if more must be taken from Redis.
        """
        with self._changing:
            now = time.monotonic()
            rest = self._slices.get(budget)
            if rest and now < rest.ends:
                if rest.left >= count:
                    rest.left -= count
                    return 0
                if rest.is_last:
                    return rest.ends - now
        return 0 if now < self._retry_redis_at else None

    def take_and_consume(self, budget: str, count: int, limit: int) -> float:
        """Consume from the slice of this process, or from one that is taken from Redis.

        Returns the seconds to wait, 0 if consumed or if Redis did not respond. Blocks for a round trip, at most
        `TIMEOUTS.redis_rates`, and for those of other threads that take of the same budget.
        """
        if (wait := self.consume(budget, count)) is not None:
            return wait
        with self._changing:
            taking = self._taking[budget]
        with taking:
            if (wait := self.consume(budget, count)) is not None:
                return wait
            wanted = max(count, min(LARGEST_SLICE, limit // 100))
            name, asked_at = f"at:rate:{{{budget}}}", time.monotonic()
            try:
                with self._redis.pipeline() as pipe:
                    pipe.set(name, 0, ex=MINUTE, nx=True)
                    pipe.incrby(name, wanted)
                    pipe.pttl(name)
                    _, used, milliseconds = pipe.execute()
            except RedisError as error:
                self._retry_redis_at = time.monotonic() + REDIS_RETRY_DELAY
                log.warning("rates_not_limited", error=str(error), seconds=REDIS_RETRY_DELAY)
                return 0
            granted = max(0, min(wanted, limit - (used - wanted)))
            # Measured from before the request: the minute ends no later here than in Redis.
            ends = asked_at + milliseconds / 1000
            with self._changing:
                rest, now = self._slices.get(budget), time.monotonic()
                left = granted + (rest.left if rest and now < rest.ends else 0)
                is_enough = left >= count
                self._slices[budget] = Slice(ends, left - count if is_enough else left, granted < wanted)
            return 0 if is_enough else max(ends - now, 0)


@cache
def get_rate_limits() -> RateLimits:
    """Return the budgets of this process."""
    return RateLimits(settings.REDIS_URL)


CHALLENGE = 'Bearer realm="aftertouch"'
BATCHED_A_REQUEST = 10  #: events, jobs and so on that a key may send in batches, as a multiple of its request limit
SMALLEST_BATCH_LIMIT = 5_000


class ApiKeyAuth(HttpAuthBase):
    """Admit requests with `Authorization: Bearer <key>` if the key has one of `scopes` and requests left this minute.

    Sets `request.auth` to the `ApiKey`. On an event loop the call returns an awaitable, in a thread the result.
    Neither costs a query or a round trip while the key and a slice of its budget are cached.
    """

    openapi_scheme = "bearer"
    is_async: bool

    def __init__(self, *scopes: str, charged: bool = True) -> None:
        """Require one of `scopes`.

        With `charged` each admission counts a request; otherwise the view calls `charge`.
        """
        super().__init__()
        self.scopes = scopes
        self.charged = charged
        self.is_async = True

    def __call__(self, request: HttpRequest) -> Any:
        key = _parse_bearer_key(request.META.get("HTTP_AUTHORIZATION", ""))
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            known, principal = api_key_cache.get_cached(key)
            admitted = self._check(principal if known else api_key_cache.load_key(key))
            if self.charged:
                charge_in_thread(admitted)
            return admitted
        return self._admit_on_loop(key)

    async def _admit_on_loop(self, key: str) -> ApiKey:
        admitted = self._check(await find_principal(key))
        if self.charged:
            await charge(admitted)
        return admitted

    def _check(self, principal: ApiKey | None) -> ApiKey:
        if principal is None:
            raise _build_unknown_key_problem()
        if principal.granted_scopes.isdisjoint(self.scopes):
            raise _build_scope_problem(*self.scopes)
        return principal


def get_principal(request: HttpRequest) -> ApiKey:
    """Return the key of an admitted request."""
    principal: ApiKey = request.auth  # type: ignore[attr-defined]
    return principal


def require_scope(request: HttpRequest, scope: str) -> None:
    """Check a scope that depends on the row or the body.

    Raises:
        Problem: 403, the key lacks it.
    """
    if scope not in get_principal(request).granted_scopes:
        raise _build_scope_problem(scope)


def build_api_key_actor(request: HttpRequest, reason: str = "") -> Actor:
    """Return the actor that history and logs name for this request: `api:<key name>`."""
    return Actor(name=f"api:{get_principal(request).name}", reason=reason)


async def charge(principal: ApiKey, what: str = "requests", count: int = 1) -> None:
    """Count as `charge_in_thread` does, on an event loop."""
    budget, limit = f"{principal.pk}:{what}", _get_limit(principal, what)
    wait = get_rate_limits().consume(budget, count)
    if wait is None:
        take = partial(get_rate_limits().take_and_consume, budget, count, limit)
        wait = await _run_in_pool(_auth_threads, take)
    _refuse_over_limit(wait, limit, what)


def charge_in_thread(principal: ApiKey, what: str = "requests", count: int = 1) -> None:
    """Count a request, or the items of a batch (`what`), which is one request. Call it before the items are stored.

    Raises:
        Problem: 429 if the limit of this minute is reached.
    """
    limit = _get_limit(principal, what)
    _refuse_over_limit(get_rate_limits().take_and_consume(f"{principal.pk}:{what}", count, limit), limit, what)


def _get_limit(principal: ApiKey, what: str) -> int:
    limit = principal.rate_per_minute or int(settings.AFTERTOUCH_API_RATE_PER_MINUTE)
    return limit if what == "requests" else max(SMALLEST_BATCH_LIMIT, limit * BATCHED_A_REQUEST)


def _refuse_over_limit(wait: float, limit: int, what: str) -> None:
    if wait:
        raise Problem(429, f"This key may send {limit} {what} a minute.", retry_after=wait)


async def admit_body(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check the key before the body is read. The scope and the rate are checked when the operation is known.

    Raises:
        Problem: 401. Whatever the database raises is left to the check of the operation.
    """
    given = next((value for name, value in headers if name == b"authorization"), b"")
    key = _parse_bearer_key(given.decode("latin-1"))
    try:
        principal = await find_principal(key)
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
