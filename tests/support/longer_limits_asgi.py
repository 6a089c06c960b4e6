"""The web process for tests, with the time limits of a slow machine."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import config.asgi
from config import http_protocol
from sessions.websocket import connection, gateway, hub
from tests.support.longer_limits import raise_time_limits

#: The path of a request that is answered once all WebSockets have ended. `/metrics` counts them too, but asks the
#: servers for all figures.
NO_SOCKETS = "/test/no-sockets"

raise_time_limits("event_lock")  # the API answers within 10 s
for name in ("HEAD_WITHIN", "BODY_WITHIN"):  # a test waits for their end
    setattr(http_protocol, name, float(os.environ.get(f"TEST_{name}", getattr(http_protocol, name))))
http_protocol.DISCARD_WITHIN = 60.0  # a client that stalls still sends the body that was refused
connection.END_WITHIN = float(os.environ.get("TEST_END_WITHIN", "120"))  # a test that stalls reads the close frame late
gateway.KEY_CHECKED_EVERY = hub.REVOCATIONS_EVERY = 0.5  # tests wait for the next look
sockets: set[int] = set()  #: ids of their scopes


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        sockets.add(id(scope))
        try:
            await config.asgi.application(scope, receive, send)
        finally:
            sockets.discard(id(scope))
    elif scope["type"] == "http" and scope["path"] == NO_SOCKETS:
        while sockets:
            await asyncio.sleep(0.005)
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})
    else:
        await config.asgi.application(scope, receive, send)
