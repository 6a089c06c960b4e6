"""The ASGI entry point: the API without the browser's middleware, everything else as usual."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")

from channels.routing import ProtocolTypeRouter, URLRouter
from django.core.asgi import get_asgi_application
from django.core.signals import request_finished
from django.db import connections

import config.celery  # noqa: F401  (before anything publishes)
from scheduling import measures
from scheduling.shared_measures import share

share()  # before anything is counted
measures.processes.labels("web").set(1)
browser = get_asgi_application()  # before anything that needs the models

from scheduling.api.handler import ApiHandler  # noqa: E402
from sessions.routing import websocket_urlpatterns  # noqa: E402

api = ApiHandler()


@request_finished.connect
def let_go_of_the_connection(**_: object) -> None:
    """A browser's request has a thread of its own under ASGI; a connection that outlived it would be nobody's. The API
    sends no such signal and keeps its few connections."""
    connections.close_all()


async def http(scope, receive, send):  # type: ignore[no-untyped-def]
    handler = api if scope["path"].startswith("/api/") else browser
    await handler(scope, receive, send)


application = ProtocolTypeRouter({"http": http, "websocket": URLRouter(websocket_urlpatterns)})
