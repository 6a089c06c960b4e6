"""The ASGI entry point: the API without the browser's middleware, everything else as usual."""

from __future__ import annotations

import os
import sys

# A server that forgets the variable must not run with the published key of the local settings.
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.production")

from channels.routing import ProtocolTypeRouter, URLRouter
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.signals import request_finished
from django.db import connections
from django.dispatch import receiver

import config.celery.application  # noqa: F401  (before anything publishes)
from scheduling import metrics
from scheduling.monitoring.multiprocess import share

if settings.AFTERTOUCH_ROLE == "execution":
    sys.exit("AFTERTOUCH_ROLE: execution has no keys and cannot serve pages")
share()  # before anything is counted
metrics.alive("web")
browser = get_asgi_application()  # before anything that needs the models

from scheduling.api.app import ApiHandler  # noqa: E402
from sessions.websocket.routing import websocket_urlpatterns  # noqa: E402

api = ApiHandler()


@receiver(request_finished)  # not `.connect`: that gives nothing back, and what nobody names is forgotten
def let_go_of_the_connection(**_: object) -> None:
    """A browser's request has a thread of its own under ASGI; a connection that outlived it would be nobody's. The API
    sends no such signal and keeps its few connections."""
    connections.close_all()


async def http(scope, receive, send):  # type: ignore[no-untyped-def]
    if scope["path"].startswith("/api/"):
        await api(scope, receive, send)
    elif status := unread(scope["headers"]):
        await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body"})
    else:
        await browser(scope, receive, send)


def unread(headers: list[tuple[bytes, bytes]]) -> int:
    """The status for a body that is not even looked at: Django writes all of it to the disk before it asks who sent it.
    The forms of the back office are short and have a length. 0 where there is nothing to refuse."""
    for name, value in headers:
        if name == b"transfer-encoding":
            return 411
        if name == b"content-length" and int(value) > settings.DATA_UPLOAD_MAX_MEMORY_SIZE:
            return 413
    return 0


application = ProtocolTypeRouter({"http": http, "websocket": URLRouter(websocket_urlpatterns)})
