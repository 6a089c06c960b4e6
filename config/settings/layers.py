"""Build the Redis address of the channel layer in the format of channels_redis."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

#: Timeouts in seconds, so that one lost connection does not delay later messages.
CONNECTION_OPTIONS = {"socket_connect_timeout": 2, "socket_timeout": 5, "health_check_interval": 15}


def layer_host(url: str, master: str) -> dict[str, Any]:
    """Return the host for `redis://…`, or for the primary behind `sentinel://host:26379/0;sentinel://host2:26379/0`."""
    if not url.startswith("sentinel"):
        return {"address": url, **CONNECTION_OPTIONS}
    parts = [urlsplit(part) for part in url.split(";")]
    found: dict[str, Any] = {
        "master_name": master,
        "sentinels": [(part.hostname or "127.0.0.1", part.port or 26379) for part in parts],
        "sentinel_kwargs": {"socket_connect_timeout": 2, "socket_timeout": 2},
        "db": int(parts[0].path.lstrip("/") or 0),
        **CONNECTION_OPTIONS,
    }
    if parts[0].username:
        found["username"] = unquote(parts[0].username)
    if parts[0].password:
        found["password"] = unquote(parts[0].password)
    return found
