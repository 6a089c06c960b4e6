"""A receiver that counts: raw calls and effects, each by idempotency key."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tests.support.waiting import WAIT_LIMIT

SECRET = "whsec_" + "ZmF1bHRzLW9ubHktc2VjcmV0LW9mLXRoaXJ0eS10d28="


@dataclass(frozen=True)
class Call:
    key: str
    path: str
    event: str  #: the id of the event that caused it
    node: str
    at: float  #: seconds since the epoch
    status: int


class EffectReceiver:
    """Serve `/once`, where a repeated key has no second effect, and `/plain`, where every call has one.

    The effect happens when the call arrives and the response follows later, so a sender that dies in between leaves the
    hard case. Users named `bad-…` are refused permanently, `shaky-…` at the first call on `/once`. `close` holds all
    responses back until `open`.
    """

    def __init__(self, answer_after: tuple[float, float] = (0.01, 0.6)) -> None:
        self.answer_after = answer_after
        self.calls: list[Call] = []
        self.forged = 0
        self.cut_off = 0  #: responses after the client has hung up
        self._seen: Counter[str] = Counter()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(WAIT_LIMIT)
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(WAIT_LIMIT)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str) -> str:
        return f"http://{self.address}/{path}"

    def channel(self, **changes: Any) -> dict[str, Any]:
        """The channel of a configuration file that sends here."""
        url = {"url": self.url("once"), "secret": SECRET}
        return {"key": "hook", "kind": "webhook", "idempotent": True, "timeout": "20s", **url, **changes}

    # --- what the tests turn --------------------------------------------------------------------------------------

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._gate.clear)

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._gate.set)

    @property
    def held(self) -> int:
        """Calls whose answer is held back."""
        return self._held

    # --- what the tests read --------------------------------------------------------------------------------------

    def calls_of(self, prefix: str) -> dict[str, list[Call]]:
        """Return the calls by idempotency key, for events whose id has this prefix."""
        found: dict[str, list[Call]] = defaultdict(list)
        for call in list(self.calls):
            if call.event.startswith(prefix):
                found[call.key].append(call)
        return found

    # --- in the receiver's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate, self._ending, self._held = asyncio.Event(), asyncio.Event(), 0
        self._gate.set()
        application = web.Application()
        application.router.add_post("/{path}", self._take)
        runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._ending.wait()
        await runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        at, raw = time.time(), await request.read()
        try:
            Webhook(SECRET).verify(raw, {name.lower(): value for name, value in request.headers.items()})
        except WebhookVerificationError:
            self.forged += 1
            return web.Response(status=401)
        key, data = request.headers["webhook-id"], json.loads(raw)["data"]
        self._seen[key] += 1
        status = self._status(request.match_info["path"], data, self._seen[key])
        self.calls.append(
            Call(key, request.match_info["path"], str(data["event"]["id"]), str(data["node"]), at, status)
        )
        await self._answer_later()
        return web.Response(status=status)

    def _status(self, path: str, data: dict[str, Any], nth: int) -> int:
        user = str(data["user_id"])
        if user.startswith("bad-"):
            return 422  # other 4xx are tried again on repeatable channels
        return 503 if user.startswith("shaky-") and path == "once" and nth == 1 else 204

    async def _answer_later(self) -> None:
        self._held += 1
        try:
            await asyncio.sleep(random.uniform(*self.answer_after))
            await self._gate.wait()
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        finally:
            self._held -= 1
