"""An HTTP server in a thread of its own that answers by a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from aiohttp import web


@dataclass(frozen=True)
class Call:
    """One request as it came in."""

    path: str
    headers: Mapping[str, str]
    json: Any
    raw: bytes = b""
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass
class ScriptedReceiver:
    """Answers with `script`, one entry a call, and 200 when it has ended: a status, (status, headers), a document with
    status 200, or "hang_up"."""

    script: list[Any] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    release_calls: threading.Event = field(default_factory=threading.Event)
    delay: float = 0.0  #: seconds until it answers

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/hook"

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.calls.append(Call(request.path, dict(request.headers), body, await request.read()))
        if self.delay:
            await asyncio.sleep(self.delay)
        step = self.script.pop(0) if self.script else 200
        if step == "hang_up":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(step, dict):
            return web.json_response(step)
        status, headers = step if isinstance(step, tuple) else (step, {})
        return web.Response(status=status, headers=headers, text="as told")

    @property
    def keys(self) -> list[str]:
        """The idempotency keys of the calls, in order."""
        return [call.headers["webhook-id"] for call in self.calls]
