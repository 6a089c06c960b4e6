"""Send frames to one WebSocket through a bounded queue, and close it even if the client does not read."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from sessions.websocket.protocol import Close

MOST_WAITING = 128  #: frames that may wait for a slow client
END_WITHIN = 10.0  #: seconds until the close frame must be sent
RATE, BURST = 20.0, 60.0  #: incoming frames: per second, and in one burst
EVENT_COST = 4  #: in frames; an event costs a transaction

Send = Callable[[Any], Awaitable[None]]


class FrameRateLimiter:
    """Token bucket for incoming frames. It holds two numbers per connection and needs no timer."""

    __slots__ = ("_level", "_seen_at")

    def __init__(self) -> None:
        self._level = BURST
        self._seen_at = time.monotonic()

    def consume(self, count: float = 1.0) -> bool:
        now = time.monotonic()
        self._level = min(self._level + (now - self._seen_at) * RATE, BURST)
        self._seen_at = now
        if self._level < count:
            return False
        self._level -= count
        return True


class SendQueue:
    """The outgoing queue of one connection. `put` never blocks.

    A task exists only while frames wait, because most connections are idle.
    """

    __slots__ = ("__weakref__", "_ending", "_send", "_sending", "_waiting")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: deque[str] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def put(self, frame: str) -> None:
        if self.ended:
            return
        if len(self._waiting) >= MOST_WAITING:
            self.end(Close.TOO_SLOW, "too slow: it does not read what is sent to it")
            return
        self._waiting.append(frame)
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._empty())

    def end(self, code: Close, reason: str) -> None:
        """Close the connection and drop waiting frames. A reconnecting page catches up by its cursor."""
        if self.ended:
            return
        self._waiting.clear()
        if self._sending:
            self._sending.cancel()  # no frame may follow the close frame
        self._ending = asyncio.get_running_loop().create_task(self._close(code, reason))

    async def emptied(self) -> None:
        """Wait until the waiting frames are sent."""
        if self._sending:
            await asyncio.wait([self._sending])

    def drop(self) -> None:
        """Cancel all sending after the client disconnected."""
        self._waiting.clear()
        for task in (self._sending, self._ending):
            if task:
                task.cancel()

    async def _empty(self) -> None:
        try:
            while self._waiting and not self.ended:
                await self._send({"type": "websocket.send", "text": self._waiting.popleft()})
        except OSError:
            self._waiting.clear()  # the client is gone; the consumer receives the disconnect
        finally:
            self._sending = None

    async def _close(self, code: Close, reason: str) -> None:
        try:
            async with asyncio.timeout(END_WITHIN):
                await self._send({"type": "websocket.close", "code": int(code), "reason": reason})
        except (TimeoutError, OSError):
            abort_connection(self._send)


def abort_connection(send: Send) -> None:
    """Abort the transport of a client that does not even read the close frame.

    ASGI has no operation for this. A plain return makes uvicorn wait until its buffer is empty, which such a client
    can delay without limit.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is not None:
        transport.abort()
