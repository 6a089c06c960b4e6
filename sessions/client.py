"""A client for gateways that let Aftertouch keep the socket: one side of one session, which comes back by itself.

    async with SessionClient("https://aftertouch.example", "session-1", token) as chat:
        await chat.message("hello")
        async for frame in chat:
            print(frame["from"], frame["text"])

It needs nothing but aiohttp, and can be copied into another project as it is. `token` is an async function without
arguments that fetches a fresh one (`POST /api/v1/sessions/{id}/token`): it is asked before each connection.
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
PATIENCE = 10.0  #: seconds for a connection, and for a sign of life after a ping
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
MOST_DOUBLINGS = 16  #: of the pause
FINAL = {1000, 1009, 4400}  #: coming back would end the same way
FINAL_ERRORS = {"invalid", "replayed"}  #: so would sending it again
AT_ONCE, PACE = 30, 0.1  #: messages that are repeated together after a reconnect, and seconds between those after them
WAITING_LIMIT = 1_000  #: frames that nobody has read yet, and messages that are not acknowledged


class Ended(Exception):
    """The server ended it for good. `code` and `reason` are those of the close frame."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code = code
        self.reason = reason


class SessionClient:
    """Messages that were not acknowledged are sent again after a reconnect, under the same id, so they are there once.
    What was missed meanwhile comes first, by the cursor. Iterating ends when it is closed, or raises `Ended`,
    or what else went wrong for good, as in `token`."""

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
        self._in_order = False  #: nothing waits that has to go first
        self._spoken = False  #: a message was acknowledged: pings say so, in case Redis loses the session

    async def __aenter__(self) -> SessionClient:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self._heard()

    # --- frames ---------------------------------------------------------------------------------------------------

    async def message(self, text: str, *, seq: int | None = None, id: str = "") -> str:
        """Sent now, or as soon as there is a connection. Returns its id, which the acknowledgement names."""
        if len(self._unacknowledged) >= WAITING_LIMIT:
            raise OverflowError(f"{WAITING_LIMIT} messages wait to be acknowledged")
        frame = {"type": "message", "text": text, "id": id or uuid.uuid4().hex}
        if seq is not None:
            frame["seq"] = seq  # type: ignore[assignment]
        self._unacknowledged[str(frame["id"])] = frame
        if self._in_order:
            await self._send(frame)  # else those before it have to go first
        return str(frame["id"])

    async def sign(self, kind: str) -> None:
        """Typing, read, and for agents tool, transfer, queue, resume: lost where there is no connection."""
        await self._send({"type": kind})

    async def event(self, event: dict[str, Any], *, id: str = "") -> None:
        """A CloudEvent about the user of this session: `specversion`, `id`, a `type` that is registered, perhaps `time`
        and `data`. Whose it is, its chat and its source are the token's. `ack` or `error` with this id answers."""
        await self._send({"type": "event", "event": event, "id": id})

    async def close_session(self) -> None:
        """The conversation is over: nothing more is sent for its silence."""
        await self._send({"type": "close"})

    async def leave(self) -> None:
        """Go away without ending the session."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _heard(self) -> AsyncIterator[dict[str, Any]]:
        while (frame := await self._frames.get()) is not None:
            if isinstance(frame, Exception):
                raise frame
            yield frame

    async def _send(self, frame: dict[str, Any]) -> None:
        if self._socket is not None and not self._socket.closed:
            text = json.dumps(frame, ensure_ascii=False)
            # Should it go again, its id is enough: a later seq may be stored by then, and this one would be ignored.
            frame.pop("seq", None)
            try:
                await self._socket.send_str(text)
            except (ConnectionError, aiohttp.ClientError):
                return  # the reader notices it too, and comes back

    # --- the connection -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Whatever ends it is told to who reads, who would wait for ever."""
        try:
            ended: Exception | None = await self._come_back()
        except Exception as error:
            ended = error
        self.connected.clear()
        await self._frames.put(ended)

    async def _come_back(self) -> Ended | None:
        """Until it is ended for good; the pause between tries grows, with some chance in it."""
        failures = 0
        async with aiohttp.ClientSession() as http:
            while True:
                try:
                    code, reason = await self._connect(http)
                except (aiohttp.ClientError, TimeoutError, OSError):
                    code, reason = 0, ""
                failures = 0 if self.connected.is_set() else min(failures + 1, MOST_DOUBLINGS)
                self.connected.clear()
                if code in FINAL:
                    return Ended(code, reason) if code != 1000 else None
                await asyncio.sleep(min(FIRST_PAUSE * 2**failures, LONGEST_PAUSE) * random.uniform(0.5, 1))  # noqa: S311

    async def _connect(self, http: aiohttp.ClientSession) -> tuple[int, str]:
        """One connection, to its end. Returns the code and the reason of the close frame, 0 where none came."""
        query = {"token": await self._token(), **({"cursor": self.cursor} if self.cursor else {})}
        timeout = aiohttp.ClientWSTimeout(ws_receive=self._ping_every + PATIENCE, ws_close=PATIENCE)
        async with asyncio.timeout(PATIENCE):
            socket = await http.ws_connect(self.address, params=query, timeout=timeout, max_msg_size=1_048_576)
        self._socket = socket
        pinging = asyncio.create_task(self._ping(socket))
        try:
            while True:
                message = await socket.receive()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    reason = message.extra if message.type is aiohttp.WSMsgType.CLOSE else ""
                    return socket.close_code or 0, str(reason or "")
                await self._take(json.loads(message.data))
        finally:
            pinging.cancel()
            if self._repeating:
                self._repeating.cancel()
            self._in_order = False
            self._socket = None
            await socket.close()

    async def _take(self, frame: dict[str, Any]) -> None:
        kind = frame["type"]
        if kind == "welcome":
            self.cursor = self.cursor or frame["cursor"]
            self.connected.set()
            self._repeating = asyncio.create_task(self._send_waiting())
        elif kind == "message":
            self.cursor = frame["cursor"]
        if kind == "ack" and frame["id"] in self._unacknowledged:
            self._spoken = True
        if kind == "ack" or (kind == "error" and frame["reason"] in FINAL_ERRORS):
            self._unacknowledged.pop(frame["id"], None)
        elif kind == "error" and frame["id"] in self._unacknowledged:
            asyncio.get_running_loop().call_later(FIRST_PAUSE * 2, self._repeat, frame["id"])
        if kind not in ("welcome", "pong"):
            await self._frames.put(frame)

    async def _send_waiting(self) -> None:
        """In their order, with what is said while they go: a seq that is overtaken would be ignored. No faster than the
        server allows, or a long absence would end each connection that follows it."""
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
        """What keeps the session from falling silent while its page is there."""
        while not socket.closed:
            await self._send({"type": "ping", **({"spoken": True} if self._spoken else {})})
            await asyncio.sleep(self._ping_every)
