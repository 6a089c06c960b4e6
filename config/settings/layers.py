"""Build the Redis address of the channel layer in the format of channels_redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from scheduling.server_addresses import parse_redis

#: Timeouts in seconds, so that one lost connection does not delay later messages.
CONNECTION_OPTIONS = {"socket_connect_timeout": 2, "socket_timeout": 5, "health_check_interval": 15}


def layer_host(url: str, master: str, sentinel_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server, or the primary behind Sentinels. `sentinel_options`: login and TLS of the Sentinels."""
    address = parse_redis(url)
    options = {**CONNECTION_OPTIONS, **address.options}
    if address.scheme == "sentinel":
        limits = {"socket_connect_timeout": 2, "socket_timeout": 2}
        return {
            "master_name": master,
            "sentinels": address.hosts,
            "sentinel_kwargs": {**limits, **sentinel_options},
            **options,
        }
    if address.scheme == "unix":
        return {"address": f"unix://{quote(address.socket)}", **options}
    options.pop("ssl", None)  # the scheme says it
    host, port = address.hosts[0]
    return {"address": f"{address.scheme}://{quote(host, safe='')}:{port}", **options}
