"""Route WebSocket addresses. A session id may contain any character of a URL path."""

from __future__ import annotations

from typing import Any

from django.urls import re_path

from sessions.websocket.consumer import SessionConsumer
from sessions.websocket.gateway import GatewayConsumer


async def reject_unknown_path(scope: Any, receive: Any, send: Any) -> Any:
    """Refuse the handshake of an unknown address. Without this route the router raises and fills the log."""
    await receive()
    await send({"type": "websocket.close"})


websocket_urlpatterns = [
    re_path(r"^ws/v1/gateway$", GatewayConsumer.as_asgi()),
    re_path(r"^ws/v1/sessions/(?P<session_id>.+)$", SessionConsumer.as_asgi()),
    re_path(r"", reject_unknown_path),
]
