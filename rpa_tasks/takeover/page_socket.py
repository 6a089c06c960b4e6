"""Serve `/ws/v1/take-overs/{id}`: pictures of a take-over to one page of the back office, and its input to the node.

The web process keeps no state: any process serves any page, and a page connects again after a loss. Login, permission
and take-over are checked at the start and every few seconds. A slow page gets fewer pictures, never a queue of them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from importlib import import_module
from typing import Any

import structlog
from django.conf import settings
from django.contrib.auth import get_user
from django.db import connections
from django.db.models.functions import Now
from django.http import HttpRequest
from django.http.request import split_domain_port, validate_host
from django.urls import re_path

from rpa_tasks.models import TAKE_OVER_SHOPS, TakeOver
from rpa_tasks.takeover.wire import (
    PICTURE,
    WATCHING,
    BadInput,
    Sealer,
    parse_input,
    run_until_one_ends,
    to_node_channel,
    to_operators_channel,
)
from scheduling import sql
from scheduling.redis_client import RedisError, connect_redis_async

log = structlog.get_logger(__name__)

CHECK_INTERVAL = 2.0  #: seconds between checks of login, permission and take-over
SILENT_LIMIT = 20.0  #: seconds without a message of the page, which pings every 5
SEND_LIMIT = 10.0  #: seconds for one message to a page
RATE, BURST = 100.0, 300.0  #: messages of a page: per second, and at once
READ_TIMEOUT = 1.0  #: seconds
ENDED, FORBIDDEN, TOO_FAST, UNAVAILABLE = 4000, 4403, 4429, 1013  #: close codes; after the last the page tries again


@dataclass(frozen=True, slots=True)
class Access:
    take_over: int
    key: bytes  #: empty: the take-over has ended
    controls: bool


class Over(Exception):
    """The connection must end with this close code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def check_access(cookies: str, take_over: int) -> Access | None:
    """Return what the user of this login may do with the take-over, read again from PostgreSQL; None: nothing."""
    try:
        request = HttpRequest()
        morsel = SimpleCookie(cookies).get(settings.SESSION_COOKIE_NAME)
        request.session = import_module(settings.SESSION_ENGINE).SessionStore(morsel.value if morsel else None)
        user = get_user(request)
        if not (user.is_active and getattr(user, "is_staff", False) and user.has_perm(TAKE_OVER_SHOPS)):
            return None
        row = TakeOver.objects.filter(pk=take_over, ended_at=None, lease_until__gt=Now()).first()
        return Access(take_over, bytes(row.key or b"") if row else b"", bool(row and row.user_id == user.pk))
    except CookieError:
        return None
    finally:
        connections.close_all()  # this thread may never serve a take-over again


def is_own_origin(headers: dict[bytes, bytes]) -> bool:
    """Return whether the page comes from this host or a trusted origin. Browsers always name the origin."""
    origin, host = headers.get(b"origin", b"").decode("latin-1"), headers.get(b"host", b"").decode("latin-1")
    if origin in settings.CSRF_TRUSTED_ORIGINS:
        return True
    allowed = validate_host(split_domain_port(host)[0], settings.ALLOWED_HOSTS)
    return allowed and bool(host) and origin.partition("://")[2].lower() == host.lower()


async def serve_take_over(scope: Any, receive: Any, send: Any) -> None:
    """ASGI application of the address. A page of another origin, or without permission, is refused unread."""
    await receive()
    headers = dict(scope["headers"])
    take_over = int(scope["url_route"]["kwargs"]["take_over"])
    cookies = headers.get(b"cookie", b"").decode("latin-1")
    access = await asyncio.to_thread(check_access, cookies, take_over) if is_own_origin(headers) else None
    if access is None:
        await send({"type": "websocket.close"})
        return
    await send({"type": "websocket.accept"})
    await _Connection(cookies, access, receive, send).serve()


class _Connection:
    def __init__(self, cookies: str, access: Access, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        self._cookies, self._access, self._receive, self._send = cookies, access, receive, send
        self._id = secrets.token_hex(8)
        self._in, self._out = to_node_channel(access.take_over), to_operators_channel(access.take_over)
        self._picture: bytes | None = None
        self._picture_came, self._picture_taken = asyncio.Event(), asyncio.Event()
        self._level, self._seen_at = BURST, time.monotonic()

    async def serve(self) -> None:
        """Serve until the page leaves, the take-over ends, or the user may no longer see it."""
        code: int | None = ENDED
        if self._access.key:
            self._sealer = Sealer(self._access.key, self._in)
            self._opener = Sealer(self._access.key, self._out)
            self._redis = connect_redis_async(settings.REDIS_URL)
            try:
                code = await self._run_tasks()
            finally:
                with suppress(RedisError, OSError):
                    await self._redis.aclose()
        if code is not None:
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._send({"type": "websocket.close", "code": code}), SEND_LIMIT)

    async def _run_tasks(self) -> int | None:
        """Return the close code, or None if the page has closed the connection."""
        self._picture_taken.set()
        try:
            await run_until_one_ends(self._read_page(), self._read_node(), self._send_pictures(), self._check())
        except Over as over:
            return over.code
        except (RedisError, OSError, TimeoutError, *sql.UNAVAILABLE_ERRORS) as error:
            log.info("take_over_page_lost", take_over=self._access.take_over, error=type(error).__name__)
            return UNAVAILABLE
        return None

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            access = await asyncio.to_thread(check_access, self._cookies, self._access.take_over)
            if access is None:
                raise Over(FORBIDDEN)
            if not access.key:
                raise Over(ENDED)

    # --- from the page to the node ------------------------------------------------------------------------------

    async def _read_page(self) -> None:
        while True:
            message = await asyncio.wait_for(self._receive(), SILENT_LIMIT)
            if message["type"] == "websocket.disconnect":
                return
            now = time.monotonic()
            self._level = min(BURST, self._level + (now - self._seen_at) * RATE) - 1
            self._seen_at = now
            if self._level < 0:
                raise Over(TOO_FAST)
            try:
                action = parse_input(message.get("text") or "")
            except BadInput:
                continue
            if action["do"] == "ack":
                self._picture_taken.set()
            if self._access.controls or action["do"] in WATCHING:
                await self._publish(action)

    async def _publish(self, action: dict[str, Any]) -> None:
        content = json.dumps({**action, "connection": self._id, "controls": self._access.controls})
        await self._redis.publish(self._in, self._sealer.seal(content.encode()))

    # --- from the node to the page ------------------------------------------------------------------------------

    async def _read_node(self) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:
            await subscription.subscribe(self._out)
            await self._publish({"do": "hello"})
            await self._send_text({"type": "welcome", "connection": self._id, "controls": self._access.controls})
            while True:
                message = await subscription.get_message(timeout=READ_TIMEOUT)
                opened = self._opener.open(message["data"]) if message else None
                if opened and opened[:1] == PICTURE:
                    self._picture = opened[1:]
                    self._picture_came.set()
                elif opened:
                    notice = json.loads(opened[1:])
                    if notice.get("to", self._id) != self._id:
                        continue  # files are for the operator who controls
                    await self._send_text(notice)
                    if self._access.controls and not notice.get("controller", self._id):
                        await self._publish({"do": "hello"})  # the node began after this page

    async def _send_text(self, content: dict[str, Any]) -> None:
        message = {"type": "websocket.send", "text": json.dumps(content, ensure_ascii=False)}
        await asyncio.wait_for(self._send(message), SEND_LIMIT)

    async def _send_pictures(self) -> None:
        """Send the newest picture whenever the page has shown the last one."""
        while True:
            await self._picture_came.wait()
            await self._picture_taken.wait()
            self._picture_came.clear()
            self._picture_taken.clear()
            await asyncio.wait_for(self._send({"type": "websocket.send", "bytes": self._picture}), SEND_LIMIT)


websocket_urlpatterns = [re_path(r"^ws/v1/take-overs/(?P<take_over>\d{1,18})$", serve_take_over)]  # type: ignore[arg-type]
