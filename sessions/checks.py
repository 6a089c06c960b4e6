"""Check at each start that the address of live chats fits the server."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register

from scheduling.redis_client import RedisError, connect_nodes, read_eviction_policy
from scheduling.server_addresses import is_cluster

SETTING = "AFTERTOUCH_SESSIONS_REDIS_URL"


@register
def check_cluster_mode(**_: Any) -> list[CheckMessage]:
    """Compare the scheme of the setting with `cluster_enabled` of its server. A server that does not answer passes."""
    url = settings.AFTERTOUCH_SESSIONS_REDIS_URL
    if not url:
        return []
    wanted = is_cluster(url)
    found = wanted
    for server in connect_nodes(url):
        with server, suppress(RedisError, OSError, LookupError):
            found = bool(server.info("cluster")["cluster_enabled"])
            break
    if found == wanted:
        return []
    if wanted:
        text = "names a cluster, but its server runs without cluster mode (cluster_enabled: 0)"
        hint = "redis:// or rediss://"
    else:
        text = "names a node of a Redis Cluster (cluster_enabled: 1) as a single server"
        hint = "redis+cluster:// or rediss+cluster://"
    return [Error(f"{SETTING} {text}.", hint=f"Start the address with {hint}", id="aftertouch.E006")]


@register
def check_eviction(**_: Any) -> list[CheckMessage]:
    """Warn of a server that deletes keys when it is full. One that does not answer passes."""
    policy = find_eviction_policy()
    if not policy:
        return []
    name = SETTING if settings.AFTERTOUCH_SESSIONS_REDIS_URL else "REDIS_URL"
    text = f"The server of {name} deletes keys when it is full (maxmemory-policy {policy}). Live chats would vanish."
    return [Warning(text, hint="Set maxmemory-policy noeviction.", id="aftertouch.W006")]


def find_eviction_policy() -> str:
    """Return the first policy by which a server of live chats deletes keys, "" if none does or answers."""
    for server in connect_nodes(settings.AFTERTOUCH_SESSIONS_REDIS_URL or settings.REDIS_URL):
        with server, suppress(RedisError, OSError):
            if policy := read_eviction_policy(server):
                return policy
    return ""
