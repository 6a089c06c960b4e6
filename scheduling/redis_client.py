"""Connect to Redis or Valkey, directly or by Sentinel. Other modules take the client's types from here."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from django.conf import settings
from redis import Redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

__all__ = [
    "UNREACHABLE_ERRORS", "NoScriptError", "Redis", "RedisError", "connect_redis", "connect_redis_async",
    "connect_sentinels", "read_eviction_policy",
]  # fmt: skip

UNREACHABLE_ERRORS = (redis.ConnectionError, redis.TimeoutError)  #: the server is away or too slow


def connect_redis(url: str, *, timeout: float | None = None) -> Redis:
    """Create a client for `redis://…`, or for the primary of `sentinel://host:26379/0;sentinel://host2:26379/0`.

    `timeout` in seconds applies to connecting and to each response; by default `TIMEOUTS.redis`. A broken
    connection is replaced once. A request that timed out is not repeated.
    """
    timeout = settings.TIMEOUTS.redis if timeout is None else timeout
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    }
    if not url.startswith("sentinel"):
        return Redis.from_url(url, **options)
    primary = connect_sentinels(url, timeout).master_for
    return primary(settings.AFTERTOUCH_SENTINEL_MASTER, Redis, **options)  # type: ignore[no-untyped-call,no-any-return]


def read_eviction_policy(client: Redis) -> str:
    """Return the policy by which a full server deletes keys, "" if it refuses writes instead.

    `INFO` shows it; managed servers may refuse `CONFIG`.
    """
    memory: dict[str, Any] = client.info("memory")
    policy = str(memory.get("maxmemory_policy", ""))
    return policy if memory.get("maxmemory") and policy != "noeviction" else ""


def connect_redis_async(url: str) -> redis.asyncio.Redis:
    """Create a client of the running event loop for an address as in `connect_redis`. It repeats no request.

    Subscriptions wait without a limit; a connection without an answer to a ping is closed after 30 s.
    """
    options: dict[str, Any] = {
        "socket_connect_timeout": settings.TIMEOUTS.redis,
        "health_check_interval": 15,
        "retry": AsyncRetry(NoBackoff(), 0),
    }
    if not url.startswith("sentinel"):
        return redis.asyncio.Redis.from_url(url, **options)
    servers, sentinel_options, credentials = _split_sentinel_url(url, settings.TIMEOUTS.redis)
    sentinels = AsyncSentinel(servers, sentinel_kwargs=sentinel_options, **credentials)  # type: ignore[no-untyped-call]
    return sentinels.master_for(settings.AFTERTOUCH_SENTINEL_MASTER, redis.asyncio.Redis, **options)  # type: ignore[no-any-return]


def connect_sentinels(url: str, timeout: float) -> Sentinel:
    """Connect to the Sentinels of a URL list. User, password and database of the first URL apply to the servers."""
    servers, sentinel_options, credentials = _split_sentinel_url(url, timeout)
    return Sentinel(servers, sentinel_kwargs=sentinel_options, **credentials)  # type: ignore[no-untyped-call]


def _split_sentinel_url(url: str, timeout: float) -> tuple[list[tuple[str, int]], dict[str, Any], dict[str, Any]]:
    """Return the Sentinels, their options, and the credentials of the servers."""
    parts = [urlsplit(part) for part in url.split(";")]
    first = parts[0]
    credentials: dict[str, Any] = {"db": int(first.path.lstrip("/") or 0)}
    if first.username:
        credentials["username"] = unquote(first.username)
    if first.password:
        credentials["password"] = unquote(first.password)
    servers = [(part.hostname or "127.0.0.1", part.port or 26379) for part in parts]
    return servers, {"socket_timeout": timeout, "socket_connect_timeout": timeout}, credentials
