"""Take the callbacks of vendors under `/hooks/<channel>/`.

A request that is not from the vendor gets 403 without a reason, whether or not the channel exists.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import structlog
from django.conf import settings
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods

from scheduling.channels.vendors.callbacks import CallbackRequest, CallbackResult
from scheduling.channels.vendors.kf_sync import SyncFailed, sync_messages
from scheduling.channels.vendors.wechat_crypto import CallbackRefused
from scheduling.configuration import snapshot
from scheduling.delivery.routing import NoTarget, channel_of
from scheduling.models.encrypted import Unreadable
from scheduling.policy.specs import ChannelSpec
from scheduling.receipts.vendor_reports import EarlyReceipt, record_callback
from scheduling.redis_client import RedisError, connect_redis

log = structlog.get_logger(__name__)

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
    spec, receiver = _find_receiver(channel)
    body = request.body if request.method == "POST" else None
    asked = CallbackRequest(request.GET.dict(), body, token, datetime.now(UTC))
    try:
        if receiver is None or spec is None:
            raise CallbackRefused
        result: CallbackResult = receiver.answer_callback(asked)
        cursor, problem = _add_synced_messages(spec, receiver, result) if result.sync_token else ("", "")
        record_callback(spec, result)
        if cursor:  # after the recording: a repeated callback fetches again what could not be recorded
            _store_cursor(_name_cursor(spec, receiver), cursor)
        if problem:
            raise SyncFailed(problem)
    except CallbackRefused:
        log.info("callback_refused", channel=channel[:64])
        return HttpResponse(status=403)
    except ValueError as error:
        log.info("callback_unreadable", channel=channel[:64], error=str(error)[:200])
        return HttpResponse(status=400)
    except EarlyReceipt:
        log.info("callback_early", channel=channel[:64])
        return HttpResponse(status=503)
    except SyncFailed as error:
        log.warning("callback_sync_failed", channel=channel[:64], error=str(error)[:200])
        return HttpResponse(status=503)
    except DatabaseError as error:
        log.warning("callback_not_recorded", channel=channel[:64], error=str(error)[:200])
        return HttpResponse(status=503)
    return HttpResponse(result.text, content_type=f"{result.content_type}; charset=utf-8")


def _find_receiver(key: str) -> tuple[ChannelSpec | None, Any]:
    """Return the channel with this key and its instance; None if it takes no callbacks."""
    spec = next((each for each in snapshot.current().channels.values() if each.key == key and not each.retired), None)
    if spec is None:
        return None, None
    try:
        channel = channel_of(spec)
    except (NoTarget, Unreadable):
        return spec, None
    return spec, channel if hasattr(channel, "answer_callback") else None


def _add_synced_messages(spec: ChannelSpec, channel: Any, result: CallbackResult) -> tuple[str, str]:
    """Add the messages since the stored cursor. Return the next one, and why messages are left, or "".

    Without a cursor the vendor sends three days.
    """
    try:
        with connect_redis(settings.REDIS_URL, timeout=settings.TIMEOUTS.redis) as client:
            stored: Any = client.get(_name_cursor(spec, channel))
    except RedisError:
        stored = None
    synced = sync_messages(channel, result.sync_token, stored.decode() if stored else "")
    result.reports += synced.result.reports
    result.messages += synced.result.messages
    return synced.cursor, synced.problem


def _store_cursor(name: str, cursor: str) -> None:
    try:
        with connect_redis(settings.REDIS_URL, timeout=settings.TIMEOUTS.redis) as client:
            client.set(name, cursor, ex=CURSOR_KEPT)
    except RedisError as error:
        log.info("callback_cursor_not_stored", name=name, error=str(error))


def _name_cursor(spec: ChannelSpec, channel: Any) -> str:
    """Return the name of a cursor. An operator can give the channel another account, which has cursors of its own."""
    return f"at:kf:{spec.id}:{channel.settings['corp_id']}:{channel.settings['open_kfid']}"
