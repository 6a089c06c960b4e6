"""An HTTP server in a thread of its own that answers by a script."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from aiohttp import web

from tests.support.thread_servers import application_in_thread


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
    delay: float = 0.0  #: seconds until it answers

    def __enter__(self) -> Self:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._serving = application_in_thread(application)
        self.url = f"{self._serving.__enter__()}/hook"
        return self

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)

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
