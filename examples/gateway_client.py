"""Client for the stream of a gateway: the frames of many users over one connection, with automatic reconnection.

    async with GatewayClient("https://aftertouch.example", key) as gateway:
        await gateway.send([{"session_id": "s-1", "user_id": "u1", "kind": "message", "seq": 1, "epoch": epoch}])
        await gateway.flush()

Requires only aiohttp, and can be copied into another project unchanged. Batches without an acknowledgement are sent
again after a reconnect. Give each frame a `seq`, and an `epoch` such as the start time of the gateway, so that a frame
sent twice counts once.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

MOST_UNACKNOWLEDGED = 32  #: batches; `send` waits then
ANSWER_TIMEOUT = 10.0  #: seconds for a connection
PING_EVERY = 30.0  #: seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
FINAL_CLOSE_CODES = {1009, 4400, 4401}  #: too long, an invalid batch, an invalid key


class StreamEnded(Exception):
    """The server closed the connection permanently."""


class GatewayClient:
    """One stream. `on_ack` gets each acknowledgement; its `refused` names invalid frames by their place.

    `send` and `flush` raise the error that ended the stream: `StreamEnded`, or an unexpected one, such as `ValueError`
    for an answer that is no JSON.
    """

    def __init__(self, server: str, key: str, on_ack: Callable[[dict[str, Any]], None] = lambda ack: None) -> None:
        self.address = f"{server.rstrip('/')}/ws/v1/gateway"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._on_ack = on_ack
        self._batches: dict[int, str] = {}  #: not acknowledged, by number
        self._last = 0
        self._next = 1  #: number of the batch that is written next
        self._changed = asyncio.Condition()
        self._error: Exception | None = None

    async def __aenter__(self) -> GatewayClient:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def send(self, frames: Sequence[dict[str, Any]]) -> None:
        """Queue up to 500 frames, at most 64 KB. Waits while too many batches are unacknowledged.

        Raises the error that ended the stream.
        """
        await self._wait_for(lambda: len(self._batches) < MOST_UNACKNOWLEDGED)
        if self._error:
            raise self._error
        self._last += 1
        self._batches[self._last] = json.dumps({"n": self._last, "frames": frames}, separators=(",", ":"))
        await self._notify()

    async def flush(self) -> None:
        """Wait until all batches are acknowledged. Raises the error that ended the stream before."""
        await self._wait_for(lambda: not self._batches)
        if self._error and self._batches:
            raise self._error

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._error or condition())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        """Pass an unexpected error to `send` and `flush`, which would otherwise wait without end."""
        try:
            await self._reconnect()
        except Exception as error:
            self._error = error
        await self._notify()

    async def _reconnect(self) -> None:
        pause = FIRST_PAUSE
        async with aiohttp.ClientSession(headers=self._headers) as http:
            while self._error is None:
                acknowledged = self._last - len(self._batches)
                try:
                    async with asyncio.timeout(ANSWER_TIMEOUT):
                        socket = await http.ws_connect(self.address, heartbeat=PING_EVERY, max_msg_size=0)
                    async with socket:
                        await self._serve(socket)
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass
                if self._error is None:
                    pause = FIRST_PAUSE if self._last - len(self._batches) > acknowledged else pause
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311  no secret
                    pause = min(pause * 2, LONGEST_PAUSE)

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        writing = asyncio.create_task(self._write(socket))
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.ERROR:  # no answer to a ping
                    break
                answer = json.loads(message.data)
                if answer["type"] == "ack":
                    del self._batches[answer["n"]]
                    self._on_ack(answer)
                    await self._notify()
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        if socket.close_code in FINAL_CLOSE_CODES:
            self._error = StreamEnded(f"closed with {socket.close_code}")

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Write the unacknowledged batches, then new ones."""
        self._next = next(iter(self._batches), self._last + 1)
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._next <= self._last)
            await socket.send_str(self._batches[self._next])
            self._next += 1
