"""Follow the signed redirects of links in messages, and record the first click of a person."""

from __future__ import annotations

import re
from uuid import UUID

import structlog
from django.core.signing import BadSignature
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from scheduling.delivery.links import find_link, read_link_token
from scheduling.models import Touch
from scheduling.operations.queries import iterate_retries
from scheduling.receipts.recording import Report, record_reports

log = structlog.get_logger(__name__)

#: Headers by which browsers and scanners mark a request that no person made.
PREFETCH_HEADERS = ("Sec-Purpose", "Purpose", "X-Purpose", "X-Moz")
PREFETCH = re.compile(r"prefetch|preview|prerender", re.IGNORECASE)
#: Programs that fetch a link to show a preview or to check it. The browser inside WeChat is `MicroMessenger`.
ROBOTS = re.compile(
    r"(?<!cu)bot\b|(?<!cu)bot[-/]|spider|crawl|preview|linkexpanding|facebookexternalhit|whatsapp|mpcrawler|wechatshare|feishu-?link"
    r"|lark-?link|safelinks|barracuda|proofpoint|mimecast|urlscan|headlesschrome|curl/|wget/|python|go-http-client"
    r"|java/|okhttp|libwww|httpclient|node-fetch|axios",
    re.IGNORECASE,
)
SETTLING = ("running", "queued", "scheduled")
RETRY_SECONDS = 1  #: a click before its message is settled; the browser asks again


@never_cache
@require_safe
def follow_link(request: HttpRequest, token: str) -> HttpResponse:
    """Redirect to the link of a sent text. A forged or outdated token gets the page 404, never a redirect."""
    try:
        delivery_key, number = read_link_token(token)
    except BadSignature:
        return _render_missing(request)
    target, settling = _find_target(delivery_key, number)
    if settling and not target:
        response = HttpResponse(status=503)
        response["Refresh"] = response["Retry-After"] = str(RETRY_SECONDS)
        return response
    if not target:
        return _render_missing(request)
    if request.method == "GET" and not is_prefetch(request):
        _record_click(delivery_key)
    response = HttpResponseRedirect(target)
    response["Referrer-Policy"] = "no-referrer"
    response["X-Robots-Tag"] = "noindex"
    return response


def is_prefetch(request: HttpRequest) -> bool:
    """Return whether a program made the request: a preview, a scanner, or a browser ahead of the person."""
    agent = request.headers.get("User-Agent", "")
    marked = any(PREFETCH.search(request.headers.get(name, "")) for name in PREFETCH_HEADERS)
    return marked or not agent or ROBOTS.search(agent) is not None


def _find_target(delivery_key: UUID, number: int) -> tuple[str, bool]:
    """Return the link in the stored text, and whether a text may still come.

    The text of an attempt that was delivered goes first: the template may have changed between attempts.
    """
    touches = Touch.objects.in_bulk(list(iterate_retries(delivery_key))).values()
    attempts = [attempt for touch in sorted(touches, key=lambda each: each.pk) for attempt in touch.attempts]
    for attempt in sorted(attempts, key=lambda each: each.outcome != "delivered"):
        if attempt.body and (target := find_link(attempt.body, number)):
            return target, False
    return "", any(touch.state in SETTLING for touch in touches)


def _record_click(delivery_key: UUID) -> None:
    """Record a click. A database that is unavailable must not keep the customer from the page."""
    try:
        record_reports([Report("clicked", delivery_key=delivery_key)])
    except DatabaseError as error:
        log.warning("click_not_recorded", delivery_key=str(delivery_key), error=str(error))


def _render_missing(request: HttpRequest) -> HttpResponse:
    response = render(request, "404.html", status=404)
    response["Referrer-Policy"] = "no-referrer"
    response["X-Robots-Tag"] = "noindex"
    return response
