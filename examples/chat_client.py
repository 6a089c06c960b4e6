"""Client for one side of one session, with automatic reconnection, for gateways that use Aftertouch's sockets.

    async with SessionClient("https://aftertouch.example", "session-1", token) as chat:
        await chat.message("hello")
        async for frame in chat:
            print(frame["from"], frame["text"])

Requires only aiohttp, and can be copied into another project unchanged. `token` is an async function without
arguments. It fetches a new token (`POST /api/v1/sessions/{id}/token`) before each connection.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import aiohttp

PING_EVERY = 15.0  #: seconds
ANSWER_TIMEOUT = 10.0  #: seconds for a connection, and for a frame after a ping
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
MOST_DOUBLINGS = 16  #: of the pause
FINAL_CLOSE_CODES = {1000, 1009, 4400, 4406}  #: close codes after which a new connection would end in the same way
FINAL_ERRORS = {"invalid", "replayed"}  #: reasons after which a repeated message would be rejected again
AT_ONCE, PACE = 30, 0.1  #: messages repeated at once after a reconnect; seconds between further ones
WAITING_LIMIT = 1_000  #: unread frames, and messages without an acknowledgement


class ConnectionEnded(Exception):
    """The server closed the connection permanently. `code` and `reason` are those of the close frame."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code = code
        self.reason = reason


class SessionClient:
    """One side of one session.

    Messages without an acknowledgement are sent again after a reconnect, under the same id, so the server stores them
    once. Missed messages arrive first, by the cursor. Iteration ends when the session is closed. It raises
    `ConnectionEnded` or any other permanent error, such as one of `token`.
    """

    def __init__(
        self,
        server: str,
        session_id: str,
        token: Callable[[], Awaitable[str]],
        *,
        cursor: str = "",
        ping_every: float = PING_EVERY,
    ) -> None:
        self.address = f"{server.rstrip('/')}/ws/v1/sessions/{quote(session_id, safe='')}"
        self.cursor = cursor
        self.connected = asyncio.Event()
        self._token = token
        self._ping_every = ping_every
        self._unacknowledged: dict[str, dict[str, Any]] = {}
        self._frames: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue(WAITING_LIMIT)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._task: asyncio.Task[None] | None = None
        self._repeating: asyncio.Task[None] | None = None
        self._in_order = False  #: no earlier message waits to be repeated
        self._has_written = False  #: a message was acknowledged: pings carry `spoken`, in case Redis loses the session

    async def __aenter__(self) -> SessionClient:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while (frame := await self._frames.get()) is not None:
            if isinstance(frame, Exception):
                raise frame
            yield frame

    # --- frames ---------------------------------------------------------------------------------------------------

    async def message(self, text: str, *, seq: int | None = None, id: str = "") -> str:
        """Send a message now, or after the next connect. Returns its id, which the acknowledgement repeats.

        Raises:
            OverflowError: too many messages wait for an acknowledgement.
        """
        if len(self._unacknowledged) >= WAITING_LIMIT:
            raise OverflowError(f"{WAITING_LIMIT} messages wait to be acknowledged")
        frame = {"type": "message", "text": text, "id": id or uuid.uuid4().hex}
        if seq is not None:
            frame["seq"] = seq  # type: ignore[assignment]
        self._unacknowledged[str(frame["id"])] = frame
        if self._in_order:
            await self._send(frame)  # otherwise earlier messages must be sent first
        return str(frame["id"])

    async def sign(self, kind: str) -> None:
        """Send typing or read, as an agent also tool, transfer, queue or resume. Lost without a connection."""
        await self._send({"type": kind})

    async def event(self, event: dict[str, Any], *, id: str = "") -> None:
        """Send a CloudEvent about the session's user: `specversion`, `id`, a registered `type`, optional `time` and
        `data`.

        The token determines customer, chat and source. The server answers with `ack` or `error` and this id.
        """
        await self._send({"type": "event", "event": event, "id": id})

    async def close_session(self) -> None:
        """Close the session. No guide message is sent for it afterwards."""
        await self._send({"type": "close"})

    async def leave(self) -> None:
        """Disconnect without closing the session."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _send(self, frame: dict[str, Any]) -> None:
        if self._socket is not None and not self._socket.closed:
            text = json.dumps(frame, ensure_ascii=False)
            # A repeat is identified by its id. With its seq it could be ignored, because a later seq may be stored by
            # then.
            frame.pop("seq", None)
            try:
                await self._socket.send_str(text)
            except (ConnectionError, aiohttp.ClientError):
                return  # the reader notices the error as well and reconnects

    # --- the connection -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Pass the end or error of the connection to the reader, which would otherwise wait without end."""
        try:
            ended: Exception | None = await self._reconnect()
        except Exception as error:
            ended = error
        self.connected.clear()
        await self._frames.put(ended)

    async def _reconnect(self) -> ConnectionEnded | None:
        """Reconnect until a permanent end. The pause doubles up to 30 s, with jitter."""
        failures = 0
        async with aiohttp.ClientSession() as http:
            while True:
                try:
                    code, reason = await self._connect(http)
                except (aiohttp.ClientError, TimeoutError, OSError):
                    code, reason = 0, ""
                failures = 0 if self.connected.is_set() else min(failures + 1, MOST_DOUBLINGS)
                self.connected.clear()
                if code in FINAL_CLOSE_CODES:
                    return ConnectionEnded(code, reason) if code != 1000 else None
                await asyncio.sleep(min(FIRST_PAUSE * 2**failures, LONGEST_PAUSE) * random.uniform(0.5, 1))  # noqa: S311

    async def _connect(self, http: aiohttp.ClientSession) -> tuple[int, str]:
        """Run one connection to its end. Returns code and reason of the close frame, 0 without one."""
        query = {"token": await self._token(), **({"cursor": self.cursor} if self.cursor else {})}
        timeout = aiohttp.ClientWSTimeout(ws_receive=self._ping_every + ANSWER_TIMEOUT, ws_close=ANSWER_TIMEOUT)
        async with asyncio.timeout(ANSWER_TIMEOUT):
            socket = await http.ws_connect(self.address, params=query, timeout=timeout, max_msg_size=1_048_576)
        self._socket = socket
        pinging = asyncio.create_task(self._ping(socket))
        try:
            while True:
                message = await socket.receive()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    reason = message.extra if message.type is aiohttp.WSMsgType.CLOSE else ""
                    return socket.close_code or 0, str(reason or "")
                await self._handle_frame(json.loads(message.data))
        finally:
            pinging.cancel()
            if self._repeating:
                self._repeating.cancel()
            self._in_order = False
            self._socket = None
            await socket.close()

    async def _handle_frame(self, frame: dict[str, Any]) -> None:
        kind = frame["type"]
        if kind == "welcome":
            self.cursor = self.cursor or frame["cursor"]
            self.connected.set()
            self._repeating = asyncio.create_task(self._send_waiting())
        elif kind == "message":
            self.cursor = frame["cursor"]
        if kind == "ack" and frame["id"] in self._unacknowledged:
            self._has_written = True
        if kind == "ack" or (kind == "error" and frame["reason"] in FINAL_ERRORS):
            self._unacknowledged.pop(frame["id"], None)
        elif kind == "error" and frame["id"] in self._unacknowledged:
            asyncio.get_running_loop().call_later(FIRST_PAUSE * 2, self._repeat, frame["id"])
        if kind not in ("welcome", "pong"):
            await self._frames.put(frame)

    async def _send_waiting(self) -> None:
        """Send waiting messages in order, including new ones, because a message with a lower seq would be ignored.

        The pace stays below the server's limit. Otherwise a long disconnection would end every following connection.
        """
        sent: set[str] = set()
        while left := [name for name in self._unacknowledged if name not in sent]:
            for name in left:
                if len(sent) >= AT_ONCE:
                    await asyncio.sleep(PACE)
                sent.add(name)
                if frame := self._unacknowledged.get(name):
                    await self._send(frame)
        self._in_order = True

    def _repeat(self, name: str) -> None:
        if name in self._unacknowledged:
            self._again = asyncio.ensure_future(self._send(self._unacknowledged[name]))

    async def _ping(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Ping while connected, so that the session does not fall silent."""
        while not socket.closed:
            await self._send({"type": "ping", **({"spoken": True} if self._has_written else {})})
            await asyncio.sleep(self._ping_every)
