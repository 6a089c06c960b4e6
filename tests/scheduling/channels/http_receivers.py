"""Real servers on loopback that behave as badly as a test wants, and the messages sent to them."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

from scheduling.channels.base import Message
from scheduling.channels.http_client import Lookup, Response, Transport, resolve_host
from scheduling.channels.ssrf import PrivateHosts
from tests.support.loopback_server import LoopbackServer

EVENT = {
    "source": "shop",
    "id": "e-1",
    "type": "material.downloaded",
    "time": datetime(2026, 11, 20, 16, tzinfo=timezone(timedelta(hours=8))),
}
LONG = timedelta(seconds=30)


class MessageFactory:
    """Alice downloaded a guide in the community c1."""

    task_id = UUID("11111111-1111-4111-8111-111111111111")
    delivery_key = UUID("22222222-2222-4222-8222-222222222222")

    def message(self, **changes: Any) -> Message:
        usual: dict[str, Any] = {
            "task_id": self.task_id, "delivery_key": self.delivery_key, "user_id": "alice", "chat_id": "c1",
            "node": "presale-download", "content_type": "guide", "category": "service", "subject": "使用指南",
            "body": "您好 Alice，指南在此 👩‍👩‍👧", "locale": "zh-hans", "event": EVENT, "target": {},
        }  # fmt: skip
        return Message(**usual | changes)


build_message = MessageFactory().message


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def reply(status: int = 200, body: bytes = b"ok", headers: Mapping[str, str] | None = None) -> bytes:
    lines = {"content-length": str(len(body))} | dict(headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body


def always(raw: bytes) -> Answer:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return answer


def reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def hang_up(request: Request, writer: asyncio.StreamWriter) -> None:
    """Answer nothing."""
    reset(writer)


async def never() -> None:
    await asyncio.Event().wait()


def end_time_limits() -> None:
    """Let a minute pass for the loop once the client waits. A short limit could end before on a slow machine."""
    loop = asyncio.get_running_loop()
    tell = loop.time
    loop.time = lambda: tell() + 60


async def time_out(*_: Any) -> None:
    """Answer nothing within the time limit."""
    end_time_limits()
    await never()


@asynccontextmanager
async def transport(
    *private: str, proxy: str = "", context: ssl.SSLContext | None = None, lookup: Lookup = resolve_host
) -> AsyncIterator[Transport]:
    """A transport that may reach these private hosts."""
    made = Transport(PrivateHosts.parse(private), proxy=proxy, ssl_context=context, lookup=lookup)
    try:
        yield made
    finally:
        await made.close()


async def post(
    through: Transport,
    url: str,
    timeout: timedelta = LONG,
    *,
    repeatable: bool = False,
    body: bytes = b"{}",
    proxy: str = "",
) -> Response:
    return await through.request("POST", url, body, {"x-a": "1"}, timeout=timeout, repeatable=repeatable, proxy=proxy)


@dataclass
class Receiver(LoopbackServer):
    """An HTTP/1.1 server. `answer` is called for each whole request and may do what it likes with the connection."""

    schemes, path = ("http", "https"), "/hook"
    answer: Answer = field(default_factory=lambda: always(reply()))
    on_connect: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.on_connect:
            await self.on_connect(reader, writer)
        while not writer.is_closing():
            request = await read_request(reader)
            self.requests.append(request)
            await self.answer(request, writer)
            await writer.drain()


async def read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(method, target, headers, await reader.readexactly(int(headers.get("content-length", 0))))
