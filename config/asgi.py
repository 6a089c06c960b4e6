"""ASGI entry point. The API runs without Django's browser middleware."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module

# The default is production: a server without the variable must not run with the published local key.
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.production")

from channels.routing import ProtocolTypeRouter, URLRouter
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.signals import request_finished
from django.db import connections
from django.dispatch import receiver
from django.urls import re_path

import config.celery.application  # noqa: F401  (before anything publishes)
from scheduling import metrics
from scheduling.monitoring.multiprocess import share_metrics

if settings.AFTERTOUCH_ROLE == "execution":
    sys.exit("AFTERTOUCH_ROLE: execution has no keys and cannot serve pages")
share_metrics()  # before the first metric
metrics.report_process("web")
browser = get_asgi_application()  # before any import that needs models

from rpa_tasks.takeover import page_socket  # noqa: E402
from scheduling.api.app import ApiHandler  # noqa: E402
from sessions.websocket.consumer import SessionConsumer  # noqa: E402
from sessions.websocket.gateway import GatewayConsumer  # noqa: E402

api = ApiHandler()


@receiver(request_finished)  # not `.connect`: it returns None, and an unreferenced receiver is garbage-collected
def close_request_connection(**_: object) -> None:
    """Close the database connections of the request's thread. Under ASGI each browser request has its own thread.

    The API does not send this signal and keeps its few connections.
    """
    connections.close_all()


async def http(scope, receive, send):  # type: ignore[no-untyped-def]
    if scope["path"].startswith("/api/"):
        await api(scope, receive, send)
    elif status := body_refusal_status(scope["headers"]):
        await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body"})
    else:
        await browser(scope, receive, send)


def body_refusal_status(headers: list[tuple[bytes, bytes]]) -> int:
    """Return 411 or 413 for a body that must not be read, else 0.

    Django writes a whole body to disk before it authenticates the sender. Forms of the back office are short and have
    a length.
    """
    for name, value in headers:
        if name == b"transfer-encoding":
            return 411
        if name == b"content-length" and int(value) > settings.DATA_UPLOAD_MAX_MEMORY_SIZE:
            return 413
    return 0


async def reject_unknown_path(scope, receive, send):  # type: ignore[no-untyped-def]
    """Refuse the handshake of an unknown address. Without this route the router raises and fills the log."""
    await receive()
    await send({"type": "websocket.close"})


websocket_urlpatterns = [
    *page_socket.websocket_urlpatterns,
    re_path(r"^ws/v1/gateway$", GatewayConsumer.as_asgi()),
    re_path(r"^ws/v1/sessions/(?P<session_id>.+)$", SessionConsumer.as_asgi()),  # an id may contain any character
    re_path(r"", reject_unknown_path),
]
application = ProtocolTypeRouter({"http": http, "websocket": URLRouter(websocket_urlpatterns)})

import_module(settings.ROOT_URLCONF)  # otherwise the first request loads it
gc.collect()
gc.freeze()  # a full collection would search a web server's modules every few thousand events
