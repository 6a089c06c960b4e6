"""The ASGI entry point: the API without the browser's middleware, everything else as usual."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")

from channels.routing import ProtocolTypeRouter
from django.core.asgi import get_asgi_application

import config.celery  # noqa: F401  (before anything publishes)

browser = get_asgi_application()  # before anything that needs the models

from scheduling.api.handler import ApiHandler  # noqa: E402

api = ApiHandler()


async def http(scope, receive, send):  # type: ignore[no-untyped-def]
    handler = api if scope["path"].startswith("/api/") else browser
    await handler(scope, receive, send)


application = ProtocolTypeRouter({"http": http})
