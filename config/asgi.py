"""The ASGI entry point: the API without the browser's middleware, everything else as usual."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings.local")

from channels.routing import ProtocolTypeRouter
from django.core.asgi import get_asgi_application
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.exception import convert_exception_to_response

import config.celery  # noqa: F401  (before anything publishes)

browser = get_asgi_application()


class ApiHandler(ASGIHandler):
    """Django without middleware: an API key needs no session and no CSRF token, and each sync middleware would cost
    an event a hop to a thread."""

    def load_middleware(self, is_async: bool = False) -> None:
        self._view_middleware: list[object] = []
        self._template_response_middleware: list[object] = []
        self._exception_middleware: list[object] = []
        self._middleware_chain = convert_exception_to_response(self._get_response_async)


api = ApiHandler()


async def http(scope, receive, send):  # type: ignore[no-untyped-def]
    handler = api if scope["path"].startswith("/api/") else browser
    await handler(scope, receive, send)


application = ProtocolTypeRouter({"http": http})
