"""Connect to Redis or Valkey, directly or by Sentinel."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel


def connect_redis(url: str, *, timeout: float | None = None) -> redis.Redis:
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
        return redis.Redis.from_url(url, **options)
    primary = connect_sentinels(url, timeout).master_for
    return primary(settings.AFTERTOUCH_SENTINEL_MASTER, redis.Redis, **options)  # type: ignore[no-untyped-call,no-any-return]


def connect_sentinels(url: str, timeout: float) -> Sentinel:
    """Connect to the Sentinels of a URL list. User, password and database of the first URL apply to the servers."""
    parts = [urlsplit(part) for part in url.split(";")]
    first = parts[0]
    credentials: dict[str, Any] = {"db": int(first.path.lstrip("/") or 0)}
    if first.username:
        credentials["username"] = unquote(first.username)
    if first.password:
        credentials["password"] = unquote(first.password)
    return Sentinel(  # type: ignore[no-untyped-call]
        [(part.hostname or "127.0.0.1", part.port or 26379) for part in parts],
        sentinel_kwargs={"socket_timeout": timeout, "socket_connect_timeout": timeout},
        **credentials,
    )
