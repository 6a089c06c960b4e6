"""Connect to Redis or Valkey, directly or by Sentinel. Other modules take the client's types from here."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from django.conf import settings
from redis import Redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.exceptions import LockError, NoScriptError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from scheduling.server_addresses import RedisAddress, is_cluster, parse_redis

__all__ = [
    "LOGIN_ERRORS", "UNREACHABLE_ERRORS", "LockError", "NoScriptError", "Redis", "RedisError", "Script",
    "connect_nodes", "connect_once", "connect_redis", "connect_redis_async", "read_eviction_policy",
]  # fmt: skip

UNREACHABLE_ERRORS = (redis.ConnectionError, redis.TimeoutError)  #: the server is away or too slow
LOGIN_ERRORS = (redis.AuthenticationError, redis.exceptions.AuthorizationError)  #: of those, it refuses the user


class Script:
    """Lua files in one text, which Redis calls by its hash."""

    def __init__(self, *files: Path) -> None:
        self.text = "".join(file.read_text(encoding="utf-8") for file in files)
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def connect_redis(url: str, *, timeout: float | None = None) -> Redis:
    """Create a client for an address of `server_addresses.parse_redis`: a server, or the primary behind Sentinels.

    `timeout` in seconds applies to connecting and to each response; by default `TIMEOUTS.redis`. A broken
    connection is replaced once. A request that timed out is not repeated.
    """
    timeout = settings.TIMEOUTS.redis if timeout is None else timeout
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
    }
    address = parse_redis(url)
    if address.scheme != "sentinel":
        return Redis(**address.server, **options)
    primary = Sentinel(**_sentinel_arguments(address, timeout)).master_for  # type: ignore[no-untyped-call]
    return primary(settings.AFTERTOUCH_SENTINEL_MASTER, Redis, **options)  # type: ignore[no-untyped-call,no-any-return]


def connect_nodes(url: str) -> list[Redis]:
    """Create a client for each node that an address names.

    Each wait for a node ends within `TIMEOUTS.probe`. No tries are repeated after a pause.
    """
    timeout = settings.TIMEOUTS.probe
    if not is_cluster(url):
        return [connect_redis(url, timeout=timeout)]
    address = parse_redis(url)
    # Without a `retry`, redis-py repeats a refused connection for four seconds.
    once = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "retry": Retry(NoBackoff(), 0)}
    return [Redis(host=host, port=port, **{**once, **address.options}) for host, port in address.hosts]


@cache
def connect_once(url: str) -> Redis:
    """Return this process's client for reports and for counts that processes share."""
    return connect_redis(url)


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
    address = parse_redis(url)
    if address.scheme != "sentinel":
        return redis.asyncio.Redis(**address.server, **options)
    sentinels = AsyncSentinel(**_sentinel_arguments(address, settings.TIMEOUTS.redis))  # type: ignore[no-untyped-call]
    return sentinels.master_for(settings.AFTERTOUCH_SENTINEL_MASTER, redis.asyncio.Redis, **options)  # type: ignore[no-any-return]


def _sentinel_arguments(address: RedisAddress, timeout: float) -> dict[str, Any]:
    """Return the Sentinels with their own login and TLS, and the options of the servers behind them."""
    limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    own = {**limits, **settings.AFTERTOUCH_SENTINEL_OPTIONS}
    return {"sentinels": address.hosts, "sentinel_kwargs": own, **address.options}
