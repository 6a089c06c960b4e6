"""Addresses that no row can be asked for: PostgreSQL keeps no NUL, and refuses it as a fault of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import BadRequest
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

API = "/api/"  #: names the field that is wrong


def refuse(request: HttpRequest) -> None:
    """Raises `BadRequest`. Filters, searches and ids all come this way, so none of them has to look."""
    if ("%00" in request.META.get("QUERY_STRING", "") or "\0" in request.path) and not request.path.startswith(API):
        raise BadRequest("NUL in the address")


@sync_and_async_middleware
def unstorable(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    if iscoroutinefunction(get_response):

        async def answer_later(request: HttpRequest) -> HttpResponseBase:
            refuse(request)
            return await cast("Awaitable[HttpResponseBase]", get_response(request))

        return answer_later

    def answer(request: HttpRequest) -> HttpResponseBase:
        refuse(request)
        return cast("HttpResponseBase", get_response(request))

    return answer
