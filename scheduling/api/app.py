"""The API as one object. The leaf apps add their routers by dotted path in `settings.API_ROUTERS`."""

from __future__ import annotations

import re
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.utils.module_loading import import_string
from ninja import NinjaAPI
from ninja.parser import Parser

from scheduling.api import bulk_actions, customers, events, failed_tasks, pauses, touches
from scheduling.api.errors import answer_with_problems
from scheduling.api.strict_json import decode
from scheduling.errors import FieldError, InvalidInput


class StrictParser(Parser):
    """What events are held to holds for every body."""

    def parse_body(self, request: HttpRequest) -> Any:
        try:
            return decode(request.body)
        except InvalidInput as error:
            resource = request.path.removeprefix("/api/v1/").partition("/")[0]
            raise InvalidInput(*(_named(each, resource) for each in error.errors)) from error


def _named(error: FieldError, resource: str) -> FieldError:
    """A place in an array, named as everywhere: `sessions.1.user_id`, not `[1].user_id`."""
    if found := re.match(r"\[(\d+)\]", error.field):
        return FieldError(f"{resource}.{found[1]}{error.field[found.end() :]}", error.message)
    return error


api = NinjaAPI(
    title="Aftertouch",
    version="1",
    urls_namespace="api",
    parser=StrictParser(),
    description="Delayed outreach. Errors are problem details; lists take `limit` and `cursor`.",
)
answer_with_problems(api)
for router in (
    events.router, touches.router, customers.router, bulk_actions.router, failed_tasks.router, pauses.router,
):  # fmt: skip
    api.add_router("", router)
for path in getattr(settings, "API_ROUTERS", ()):
    api.add_router("", import_string(path))
