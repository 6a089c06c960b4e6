"""Serve probes, metrics, the administrator check for the web server, and unsubscribe pages."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import structlog
from celery import current_app
from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.core.signing import BadSignature
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_safe
from prometheus_client import CONTENT_TYPE_LATEST

from scheduling.channels.email import read_token
from scheduling.dispatch import broker_health
from scheduling.monitoring import collectors
from scheduling.operations import commands
from scheduling.redis_client import connect_redis, read_eviction_policy

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
    seconds = settings.TIMEOUTS.probe
    with current_app.connection_for_write(connect_timeout=seconds) as broker:
        broker.transport_options = {**broker.transport_options, "socket_timeout": seconds}
        broker.ensure_connection(max_retries=1, timeout=seconds)
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


@csrf_exempt
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def unsubscribe(request: HttpRequest, token: str) -> HttpResponse:
    """Show the unsubscribe page; a POST opts the customer out.

    A GET changes nothing, because mail scanners follow every link. A POST comes from the form or in one click (RFC
    8058), without login, cookie or CSRF token. The signed token authorises it.
    """
    try:
        user_id = read_token(token)
    except BadSignature:
        return _render_unsubscribe_page(request, "unknown", status=404)
    if request.method == "POST":
        commands.update_customer(user_id, {"objection": True}, actor="unsubscribe")
        log.info("unsubscribed", user_id=user_id)
        return _render_unsubscribe_page(request, "done")
    return _render_unsubscribe_page(request, "ask")


def _render_unsubscribe_page(request: HttpRequest, step: str, *, status: int = 200) -> HttpResponse:
    response = render(request, "scheduling/unsubscribe.html", {"step": step}, status=status)
    response["Referrer-Policy"] = "no-referrer"
    response["X-Robots-Tag"] = "noindex"
    return response
