"""Serve probes, metrics, the administrator check for the web server, and pages for other people's clicks.

These are unsubscribe pages and the signed redirects of links in messages, which record the first click of a person.

Callbacks of vendors arrive under `/hooks/<channel>/`. A request that is not from the vendor gets 403 without a reason,
whether or not the channel exists.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import UUID

import structlog
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.core.signing import BadSignature
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_safe
from prometheus_client import CONTENT_TYPE_LATEST

from scheduling import broker_health
from scheduling.channels.base import CallbackRefused, CallbackRequest, Channel, Report
from scheduling.channels.email import read_token
from scheduling.channels.vendors.wechat import WeChatService
from scheduling.configuration import snapshot
from scheduling.delivery.links import find_link, read_link_token
from scheduling.delivery.routing import NoTarget, channel_of
from scheduling.models import Touch
from scheduling.models.encrypted import Unreadable
from scheduling.monitoring import collectors
from scheduling.operations import commands
from scheduling.operations.queries import iterate_retries
from scheduling.policy.specs import ChannelSpec
from scheduling.receipts import EarlyReceipt, record_callback, record_reports
from scheduling.redis_client import RedisError, connect_redis, read_eviction_policy

log = structlog.get_logger(__name__)

CLOCK_SKEW = timedelta(seconds=1)  #: with a larger skew, touches would be early or late by this node's clock


# --- probes -------------------------------------------------------------------------------------------------------


@never_cache
@require_safe
def report_liveness(request: HttpRequest) -> JsonResponse:
    """Return 200 while the process answers. Uses no other service, so that an outage elsewhere causes no restart."""
    return JsonResponse({"status": "ok"})


@never_cache
@require_safe
def report_readiness(request: HttpRequest) -> JsonResponse:
    """Return 200 while events can be stored. Without Redis or the broker they still can; touches are then late."""
    database = _run_check(_check_database)
    states = {"database": database, "redis": _run_check(_check_redis), "broker": _run_check(_check_broker)}
    is_ready = database["status"] == "ok"
    healthy = all(state["status"] == "ok" for state in states.values())
    status = "ok" if healthy else "degraded" if is_ready else "down"
    return JsonResponse({"status": status, **states}, status=200 if is_ready else 503)


def _run_check(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    started_at = time.monotonic()
    try:
        found = {"status": "ok", **check()}
    except Exception as error:
        log.warning("not_ready", check=check.__name__, error=str(error))
        # The message may contain an address. The log has it.
        found = {"status": "down", "error": type(error).__name__}
    return {**found, "seconds": round(time.monotonic() - started_at, 4)}


def _check_database() -> dict[str, Any]:
    asked_at = datetime.now(UTC)
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        row = cursor.fetchone()
    answered_at = datetime.now(UTC)
    if row is None:
        raise DatabaseError("no answer")
    # Half of the round trip is uncertainty, not skew.
    skew = abs(row[0] - (asked_at + (answered_at - asked_at) / 2)) - (answered_at - asked_at) / 2
    seconds = max(0.0, round(skew.total_seconds(), 4))
    if skew > CLOCK_SKEW:
        return {"status": "skewed", "clock_skew_seconds": seconds}
    return {"clock_skew_seconds": seconds}


def _check_redis() -> dict[str, Any]:
    client = connect_redis(settings.REDIS_URL, timeout=settings.TIMEOUTS.probe)
    try:
        policy = read_eviction_policy(client)
    finally:
        client.close()
    return {"status": "evicts", "policy": policy} if policy else {}


def _check_broker() -> dict[str, Any]:
    with broker_health.connect_broker(settings.TIMEOUTS.probe) as broker:
        if broker_health.accepts_messages(broker) is False:
            return {"status": "blocked"}
    return {}


# --- check for the web server ---------------------------------------------------------------------------------------


@never_cache
@require_safe
def check_administrator(request: HttpRequest) -> HttpResponse:
    """Answer the web server's `auth_request`: 204 for an administrator, 401 without login, 403 for other users.

    It protects pages that have no accounts of this application, such as Flower. The answer to an administrator has
    the login of Flower, which nginx forwards to Flower and never to the client.
    """
    user = request.user
    if user.is_active and user.is_superuser:
        login = base64.b64encode(settings.FLOWER_LOGIN.encode()).decode()
        headers = {"X-Flower-Authorization": f"Basic {login}"} if login else {}
        return HttpResponse(status=204, headers=headers)
    return HttpResponse(status=403 if user.is_authenticated else 401)


@never_cache
@require_safe
def open_flower(request: HttpRequest) -> HttpResponse:
    """Redirect an administrator to Flower. Answer 403 to other users.

    Behind nginx its gate logs the administrator in. Without nginx the address has the login, which the browser sends
    to Flower only.
    """
    if not request.user.is_superuser:
        raise PermissionDenied
    address = urlsplit(settings.FLOWER_URL)
    if address.netloc and settings.FLOWER_LOGIN:
        name, _colon, password = settings.FLOWER_LOGIN.partition(":")
        address = address._replace(netloc=f"{quote(name, safe='')}:{quote(password, safe='')}@{address.netloc}")
    return redirect(address.geturl())


# --- metrics ------------------------------------------------------------------------------------------------------


@never_cache
@require_GET
def export_metrics(request: HttpRequest) -> HttpResponse:
    """Return process metrics of this node and cluster metrics."""
    return HttpResponse(
        collectors.export_node_metrics() + collectors.export_cluster_metrics(), content_type=CONTENT_TYPE_LATEST
    )


# --- unsubscribe --------------------------------------------------------------------------------------------------


UNSUBSCRIBE_PAGE = "scheduling/unsubscribe.html"


def unlisted(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Keep an address with a token from the servers that its page leads to, and from search engines."""

    @wraps(view)
    def answer(request: HttpRequest, token: str) -> HttpResponse:
        response = view(request, token)
        response["Referrer-Policy"] = "no-referrer"
        response["X-Robots-Tag"] = "noindex"
        return response

    return answer


@csrf_exempt
@never_cache
@unlisted
@require_http_methods(["GET", "HEAD", "POST"])
def unsubscribe(request: HttpRequest, token: str) -> HttpResponse:
    """Show the unsubscribe page; a POST opts the customer out.

    A GET changes nothing, because mail scanners follow every link. A POST comes from the form or in one click (RFC
    8058), without login, cookie or CSRF token. The signed token authorises it.
    """
    try:
        user_id = read_token(token)
    except BadSignature:
        return render(request, UNSUBSCRIBE_PAGE, {"step": "unknown"}, status=404)
    if request.method == "POST":
        commands.update_customer(user_id, {"objection": True}, actor="unsubscribe")
        log.info("unsubscribed", user_id=user_id)
        return render(request, UNSUBSCRIBE_PAGE, {"step": "done"})
    return render(request, UNSUBSCRIBE_PAGE, {"step": "ask"})


# --- links of messages ------------------------------------------------------------------------------------------------


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
@unlisted
@require_safe
def follow_link(request: HttpRequest, token: str) -> HttpResponse:
    """Redirect to the link of a sent text. A forged or outdated token gets the page 404, never a redirect."""
    try:
        delivery_key, number = read_link_token(token)
    except BadSignature:
        return render(request, "404.html", status=404)
    target, settling = _find_target(delivery_key, number)
    if settling and not target:
        response = HttpResponse(status=503)
        response["Refresh"] = response["Retry-After"] = str(RETRY_SECONDS)
        return response
    if not target:
        return render(request, "404.html", status=404)
    if request.method == "GET" and not is_prefetch(request):
        # Record a click. A database that is unavailable must not keep the customer from the page.
        try:
            record_reports([Report("clicked", delivery_key=delivery_key)])
        except DatabaseError as error:
            log.warning("click_not_recorded", delivery_key=str(delivery_key), error=str(error))
    return HttpResponseRedirect(target)


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


# --- callbacks of vendors ---------------------------------------------------------------------------------------------


LARGEST_BODY = 1_048_576  #: bytes
CURSOR_KEPT = 3 * 86_400  #: seconds; WeCom keeps the messages for as long


@csrf_exempt
@never_cache
@require_http_methods(["GET", "POST"])
def receive_callback(request: HttpRequest, channel: str, token: str = "") -> HttpResponse:
    """Record what a genuine callback reports, then answer as its vendor expects.

    The vendor repeats a callback whose answer is an error. Recording is idempotent.
    """
    if int(request.headers.get("Content-Length") or 0) > LARGEST_BODY:
        return HttpResponse(status=413)
    body = request.body if request.method == "POST" else None
    asked = CallbackRequest(request.GET.dict(), body, token, datetime.now(UTC))
    try:
        spec, receiver = _find_receiver(channel)
        result = receiver.answer_callback(asked)
        name = ""
        if isinstance(receiver, WeChatService) and result.sync_token:
            # An operator can give the channel another account, which has cursors of its own.
            name = f"at:kf:{spec.id}:{receiver.settings['corp_id']}:{receiver.settings['open_kfid']}"
            receiver.fetch_messages(result, _read_cursor(name))
        record_callback(spec, result)
        if result.cursor:  # after the recording: a repeated callback fetches again what could not be recorded
            _store_cursor(name, result.cursor)
    except CallbackRefused:
        log.info("callback_refused", channel=channel[:64])
        return HttpResponse(status=403)
    except ValueError as error:
        log.info("callback_unreadable", channel=channel[:64], error=str(error)[:200])
        return HttpResponse(status=400)
    except EarlyReceipt:
        log.info("callback_early", channel=channel[:64])
        return HttpResponse(status=503)
    except DatabaseError as error:
        log.warning("callback_not_recorded", channel=channel[:64], error=str(error)[:200])
        return HttpResponse(status=503)
    if result.problem:
        log.warning("callback_sync_failed", channel=channel[:64], error=result.problem[:200])
        return HttpResponse(status=503)
    return HttpResponse(result.text, content_type=f"{result.content_type}; charset=utf-8")


def _find_receiver(key: str) -> tuple[ChannelSpec, Channel]:
    """Return the channel with this key and its instance. Raises `CallbackRefused`."""
    spec = next((each for each in snapshot.current().channels.values() if each.key == key and not each.retired), None)
    try:
        if spec is not None:
            return spec, channel_of(spec)
    except (NoTarget, Unreadable):
        pass
    raise CallbackRefused


def _read_cursor(name: str) -> str:
    """Return the end of what was fetched. Without it the vendor sends three days."""
    try:
        with connect_redis(settings.REDIS_URL, timeout=settings.TIMEOUTS.redis) as client:
            stored: Any = client.get(name)
    except RedisError:
        return ""
    return stored.decode() if stored else ""


def _store_cursor(name: str, cursor: str) -> None:
    try:
        with connect_redis(settings.REDIS_URL, timeout=settings.TIMEOUTS.redis) as client:
            client.set(name, cursor, ex=CURSOR_KEPT)
    except RedisError as error:
        log.info("callback_cursor_not_stored", name=name, error=str(error))
