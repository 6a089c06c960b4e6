"""The API as one object. The leaf apps add their routers by dotted path in `settings.API_ROUTERS`."""

from __future__ import annotations

from django.conf import settings
from django.utils.module_loading import import_string
from ninja import NinjaAPI

from scheduling.api import events
from scheduling.api.problems import answer_with_problems

api = NinjaAPI(
    title="Aftertouch",
    version="1",
    urls_namespace="api",
    description="Delayed outreach. Errors are problem details; lists take `limit` and `cursor`.",
)
answer_with_problems(api)
for router in (events.router,):
    api.add_router("", router)
for path in getattr(settings, "API_ROUTERS", ()):
    api.add_router("", import_string(path))
