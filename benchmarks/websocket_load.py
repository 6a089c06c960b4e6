"""Open many WebSockets that ping and count, with little processor time, because the server runs on the same machine.

Each line on standard input is answered with a line of JSON counts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import time
from datetime import timedelta
from urllib.parse import quote

import django
import uvloop

PING = b'{"type":"ping"}'
PING_FRAME = bytes([0x81, 0x80 | len(PING)]) + bytes(4) + PING  # a mask of zeros changes nothing
OPENING_AT_ONCE = 100


class PongTally:
    def __init__(self) -> None:
        self.open = self.lost = self.pings = self.pongs = self.missed = self.messages = 0
        self.slowest = self.last_at = 0.0
        self.keys: set[bytes] = set()

    def format_line(self) -> str:
        plain = {name: value for name, value in vars(self).items() if name != "keys"}
        return json.dumps({**plain, "twice": self.messages - len(self.keys)})


class Page(asyncio.Protocol):
    """One connection. Frames of the server are short, so they arrive unmasked and unfragmented."""

    def __init__(self, tally: PongTally, request: bytes, ready: asyncio.Future[None]) -> None:
        self.tally, self.request, self.ready = tally, request, ready
        self.buffer = b""
        self.in_frames = False
        self.pinged_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.in_frames:
            head, end, self.buffer = self.buffer.partition(b"\r\n\r\n")
            if not end:
                self.buffer = head
                return
            assert b" 101 " in head.splitlines()[0], head
            self.in_frames = True
        while frame := self._cut():
            self._take(frame)

    def _cut(self) -> bytes:
        if len(self.buffer) < 2:
            return b""
        size, start = self.buffer[1], 2
        if size == 126:
            size, start = int.from_bytes(self.buffer[2:4]), 4
        if len(self.buffer) < start + size:
            return b""
        frame, self.buffer = self.buffer[start : start + size], self.buffer[start + size :]
        return frame

    def _take(self, frame: bytes) -> None:
        tally = self.tally
        if frame == b'{"type":"pong"}':
            tally.pongs += 1
            tally.slowest = max(tally.slowest, time.monotonic() - self.pinged_at)
            self.pinged_at = 0.0
        elif b'"type": "message"' in frame:
            tally.messages += 1
            tally.last_at = time.time()
            tally.keys.add(json.loads(frame)["id"].encode())
        elif b'"type": "welcome"' in frame:
            tally.open += 1
            self.ready.set_result(None)

    def ping(self) -> None:
        if self.pinged_at:
            self.tally.missed += 1
        self.pinged_at = time.monotonic()
        self.tally.pings += 1
        self.transport.write(PING_FRAME)

    def connection_lost(self, error: Exception | None) -> None:
        self.tally.lost += 1
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(self.buffer[:200]))


def handshake_request(session: str, port: int) -> bytes:
    from sessions import tokens

    token, _ = tokens.issue_token(tokens.Admission(session, f"user-of-{session}", "c1", "", "user"), timedelta(hours=1))
    lines = [
        f"GET /ws/v1/sessions/{session}?token={quote(token)} HTTP/1.1", f"Host: 127.0.0.1:{port}",
        "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}", "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode()


async def main(prefix: str, count: int, port: int, ping_every: float) -> None:
    tally, pages = PongTally(), list[Page]()
    slots = asyncio.Semaphore(OPENING_AT_ONCE)

    async def enter(number: int) -> None:
        async with slots:
            ready: asyncio.Future[None] = loop.create_future()
            request = handshake_request(f"{prefix}-{number:05}", port)
            _, page = await loop.create_connection(lambda: Page(tally, request, ready), "127.0.0.1", port)
            await ready
            pages.append(page)

    loop = asyncio.get_running_loop()
    await asyncio.gather(*(enter(number) for number in range(count)))
    pinging = loop.create_task(keep_pinging(pages, ping_every))
    print(tally.format_line(), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(tally.format_line(), flush=True)
    pinging.cancel()


async def keep_pinging(pages: list[Page], every: float) -> None:
    """Send pings spread over the interval, as from pages opened at different times."""
    began_at = time.monotonic()
    turn = 0
    while True:
        for number, page in enumerate(pages):
            due_at = began_at + every * (turn + number / len(pages))
            if (wait := due_at - time.monotonic()) > 0.005:
                await asyncio.sleep(wait)
            page.ping()
        turn += 1


if __name__ == "__main__":
    django.setup()
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
