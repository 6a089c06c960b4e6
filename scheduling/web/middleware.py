"""Set the Content Security Policy of every response, refuse NUL in addresses, and show users their own changes.

Pages load nothing from other origins, run no inline scripts and cannot be framed.
`docs/decisions/0018-run-no-inline-scripts.md` explains the exceptions of the back office.

Users of the back office read their own changes, also where lists come from the read replica.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from django.conf import settings
from django.core.exceptions import BadRequest
from django.db import Error
from django.http import HttpRequest, HttpResponseBase

from scheduling import replica

Answer = Callable[[HttpRequest], HttpResponseBase]

POLICY = "Content-Security-Policy"
#: For responses that are not pages: JSON, CSV, metrics, and other types that a browser might render.
NOT_A_PAGE = "default-src 'none'; frame-ancestors 'none'"
STRICT = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "font-src": "'self'",
    "connect-src": "'self'",
    "form-action": "'self'",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
}
#: Alpine compiles the expressions in Unfold's markup; Unfold writes its colours into the page, and styles into tags.
BACK_OFFICE = {**STRICT, "script-src": "'self' 'unsafe-eval'", "style-src": "'self' 'unsafe-inline'"}
NOT_NEEDED = "accelerometer camera display-capture geolocation gyroscope magnetometer microphone midi payment usb"
PERMISSIONS = ", ".join(f"{each}=()" for each in NOT_NEEDED.split())


def choose_policy(request: HttpRequest, response: HttpResponseBase) -> str:
    if not str(response.get("Content-Type", "")).startswith("text/html"):
        return NOT_A_PAGE
    match = request.resolver_match
    directives = BACK_OFFICE if match and "admin" in match.namespaces else STRICT
    return "; ".join(f"{name} {sources}" for name, sources in directives.items())


def set_security_headers(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Set the headers, except a policy that the view has set: evidence of failed runs has a stricter one."""
    if not (settings.DEBUG and response.status_code >= 400):  # Django's own debug pages
        response.headers.setdefault(POLICY, choose_policy(request, response))
    response.headers.setdefault("Permissions-Policy", PERMISSIONS)
    return response


def page_headers_middleware(get_response: Answer) -> Answer:
    def answer(request: HttpRequest) -> HttpResponseBase:
        return set_security_headers(request, get_response(request))

    return answer


API = "/api/"  #: the API checks NUL itself and names the wrong field


def refuse_nul_middleware(get_response: Answer) -> Answer:
    """Answer 400 to NUL in the path or query, which PostgreSQL cannot store. Filters and searches need no own check."""

    def answer(request: HttpRequest) -> HttpResponseBase:
        if ("%00" in request.META.get("QUERY_STRING", "") or "\0" in request.path) and not request.path.startswith(API):
            raise BadRequest("NUL in the address")
        return get_response(request)

    return answer


COOKIE = "aftertouch_position"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


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
