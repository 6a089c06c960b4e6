"""Let users of the back office read their own changes, also where lists come from the read replica."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from django.conf import settings
from django.db import Error
from django.http import HttpRequest, HttpResponseBase

from scheduling import replica

COOKIE = "aftertouch_position"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
Answer = Callable[[HttpRequest], HttpResponseBase]


def own_writes_middleware(get_response: Answer) -> Answer:
    """Remember the primary's position after each change of a user, in a cookie of the browser.

    The cookie lives twice as long as a usable replica may lag.
    """

    def answer(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        if replica.is_configured() and request.method not in SAFE_METHODS and request.user.is_authenticated:
            with suppress(Error):  # the change is stored; without the cookie a list may show it seconds later
                response.set_cookie(
                    COOKIE, str(replica.read_primary_position()), max_age=2 * settings.AFTERTOUCH_REPLICA_LAG_LIMIT,
                    secure=settings.SESSION_COOKIE_SECURE, httponly=True, samesite="Lax",
                )  # fmt: skip
        return response

    return answer


def read_own_position(request: HttpRequest) -> int:
    """Return the position that the user's last change needs; 0 without one."""
    text = request.COOKIES.get(COOKIE, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0
