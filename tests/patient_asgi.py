"""The web process for tests. A machine that stalls for seconds is no server that is away."""

from __future__ import annotations

from config.asgi import application
from scheduling import redis_client
from scheduling.api import auth
from scheduling.web import views
from sessions.websocket import hub

__all__ = ["application"]

redis_client.DEFAULT_TIMEOUT = auth.SOCKET_TIMEOUT = views.PROBE_TIMEOUT = hub.NOTIFY_TIMEOUT = 20.0
