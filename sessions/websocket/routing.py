"""The WebSocket addresses. A session may be called anything that an address can carry."""

from __future__ import annotations

from typing import Any

from django.urls import re_path

from sessions.websocket.consumer import SessionConsumer


async def nowhere(scope: Any, receive: Any, send: Any) -> Any:
    """No such address: the handshake is refused. Without this the router would raise, and a stranger fill the log."""
    await receive()
    await send({"type": "websocket.close"})


websocket_urlpatterns = [
    re_path(r"^ws/v1/sessions/(?P<session_id>.+)$", SessionConsumer.as_asgi()),
    re_path(r"", nowhere),
]
