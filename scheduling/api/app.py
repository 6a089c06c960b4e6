"""Build the HTTP API and its ASGI handler. `config.urls` adds the routers of other apps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import wraps
from io import BytesIO
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler, ASGIRequest, get_script_prefix
from django.core.handlers.exception import convert_exception_to_response
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix, set_urlconf
from ninja import NinjaAPI
from ninja.operation import Operation
from ninja.parser import Parser
from simple_history.models import HistoricalRecords

from scheduling.api import (
    bulk_actions,
    config,
    customers,
    events,
    failed_tasks,
    receipts,
    receivers,
    touches,
    webhooks,
)
from scheduling.api.auth import admit_body, in_database_thread
from scheduling.api.schemas import MEDIA_TYPE, Problem, register_problem_handlers
from scheduling.errors import FieldError, InvalidInput
from scheduling.planning import request_metrics
from scheduling.strict_text import PATH_SHOWN, decode_json
from scheduling.web.middleware import NOT_A_PAGE, POLICY, set_security_headers


class StrictParser(Parser):
    """Apply the strict JSON rules of events to every request body."""

    def parse_body(self, request: HttpRequest) -> Any:
        return decode_json(request.body, array=request.path.removeprefix("/api/v1/").partition("/")[0])


class Api(NinjaAPI):
    def get_openapi_operation_id(self, operation: Operation) -> str:
        """Name it by its tag. A generated client must not change when the module of a view does."""
        tag = (operation.tags or ["api"])[0]
        return f"{tag}_{operation.view_func.__name__}".replace(" ", "_").lower()


def refuse_unknown_parameters(view: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse query parameters that a view does not have, and single ones that are given twice.

    Ninja ignores them: a misspelt filter would choose every row. The result of an asynchronous view is its coroutine.
    """
    models = [model for model in view._ninja_operation.models if model.__ninja_param_source__ == "query"]  # type: ignore[attr-defined]
    known = {name for model in models for name in model.__ninja_flatten_map__}
    lists = {name for model in models for name in model.__ninja_collection_fields__}

    @wraps(view)
    def run(request: HttpRequest, **values: Any) -> Any:
        if request.method == "OPTIONS":  # the handshake of a webhook, at the address to which events are sent
            return view(request, **values)
        errors = []
        for name, given in request.GET.lists():
            if name not in known:
                errors.append(FieldError(name[:PATH_SHOWN], "is no parameter here"))
            elif len(given) > 1 and name not in lists:
                errors.append(FieldError(name, "is given twice"))
        if errors:
            raise InvalidInput(*errors)
        return view(request, **values)

    return run


api = Api(
    title="Aftertouch",
    version="1",
    urls_namespace="api",
    parser=StrictParser(),
    description="Delayed outreach. Errors are problem details; lists take `limit` and `cursor`.",
)
register_problem_handlers(api)
api.add_decorator(refuse_unknown_parameters)
for router in (
    events.router, touches.router, customers.router, bulk_actions.router,
    failed_tasks.router, receivers.router, receipts.router, webhooks.router,
    config.router,
):  # fmt: skip
    api.add_router("", router)


BODY_TIMEOUT = 30  #: seconds; limit for receiving a body
DETAILS = {
    404: "There is no such thing.",
    405: "This method is not allowed here.",
    500: "Something went wrong here. It has been logged.",
}


class ClientGone(Exception):
    """The client closed the connection before the body was complete."""


class ApiHandler(ASGIHandler):
    """Run Django for machine clients.

    There is no middleware, because an API key needs neither session nor CSRF token. There are no request signals: their
    receivers would cost each event three switches to a thread. Synchronous views run in the API's own threads. Every
    error becomes a problem document.
    """

    def load_middleware(self, is_async: bool = False) -> None:
        self._view_middleware: list[object] = []
        self._template_response_middleware: list[object] = []
        self._exception_middleware: list[object] = []
        self._middleware_chain = convert_exception_to_response(self._get_response_async)  # type: ignore[attr-defined]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        started_at, route = time.monotonic(), "unread"
        try:
            response, route = await self._respond(scope, receive)
        except ClientGone:
            return
        except Problem as problem:
            # The rest of the body is not read, so the connection cannot be used again.
            response = problem.response()
            response["Connection"] = "close"
        response["X-Content-Type-Options"] = "nosniff"
        response["Referrer-Policy"] = "no-referrer"
        response.headers.setdefault(POLICY, NOT_A_PAGE)
        if "Cache-Control" not in response:
            response["Cache-Control"] = "no-store"
        request_metrics.observe_request(route, response.status_code, time.monotonic() - started_at)
        await self.send_response(response, send)

    async def _respond(self, scope: Any, receive: Any) -> tuple[HttpResponseBase, str]:
        """Return the response and the route that produced it."""
        body = await _read_request_body(scope, receive)
        set_script_prefix(get_script_prefix(scope))
        try:
            request = ASGIRequest(scope, BytesIO(body))
        except UnicodeDecodeError:
            return Problem(400, "The address cannot be read.").response(), "unread"
        response = await self.get_response_async(request)
        route = request.resolver_match.route if request.resolver_match else "unknown"
        set_security_headers(request, response)
        if response.status_code >= 400 and not str(response.get("Content-Type", "")).startswith(MEDIA_TYPE):
            kept = {name: value for name, value in response.items() if name in ("Allow", "Retry-After")}
            status = response.status_code
            detail = DETAILS.get(status, "The request cannot be answered.")
            return Problem(status, detail, headers=kept).response(), route
        return response, route

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        """Call the view without Django's log line for each refused request.

        That line costs a switch to a thread, which matters in a flood of refusals. Metrics count refusals; unexpected
        errors are logged where they become a problem document.
        """
        set_urlconf(settings.ROOT_URLCONF)
        chain: Any = self._middleware_chain
        response: HttpResponseBase = await chain(request)
        return response

    def make_view_atomic(self, view: Callable[..., Any]) -> Callable[..., Any]:
        """Return the coroutine function that runs a view.

        Django calls this hook for every view; synchronous views run in the API's threads.
        """
        if iscoroutinefunction(view):
            return view

        def answer(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            # In the thread, and for this request alone. The audit log takes the address from it.
            HistoricalRecords.context.request = request
            return view(request, *args, **kwargs)

        async def run(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            return await in_database_thread(answer, request, *args, **kwargs)

        return run


async def _read_request_body(scope: Any, receive: Any) -> bytes:
    """Read the whole body, at most `DATA_UPLOAD_MAX_MEMORY_SIZE` bytes and `BODY_TIMEOUT` seconds.

    Raises:
        Problem: 413 as soon as the body is known to be too long; 408 after the time limit.
        ClientGone: the client closed the connection.
    """
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    too_long = Problem(413, f"The body is longer than {limit} bytes.")
    announced = False
    for name, value in scope["headers"]:
        if name == b"content-length":
            announced = int(value) > 0
            if int(value) > limit:
                raise too_long
        elif name == b"transfer-encoding":
            announced = True
    if announced:
        await admit_body(scope["headers"])
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_long
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError as error:
        raise Problem(408, f"The body was not complete after {BODY_TIMEOUT} seconds.") from error
