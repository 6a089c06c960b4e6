"""A forward proxy on loopback: CONNECT and absolute-form requests, with a password or without."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.scheduling.channels.http_receivers import Answer, Request, read_request, reply
from tests.support.loopback_server import LoopbackServer


@dataclass
class ForwardProxy(LoopbackServer):
    """Leads each request to `port_of` its target, on loopback; by default to the port that the target names."""

    schemes = ("http", "https")
    login: str = ""  #: user:password
    refusals: Mapping[str, bytes] = field(default_factory=dict)  #: raw answers by target; "": for all
    answer: Answer | None = None  #: does what it likes instead
    port_of: Callable[[str], int] = lambda target: int(target.rpartition(":")[2])
    targets: list[str] = field(default_factory=list)  #: `CONNECT host:port`, `POST http://…`
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while not writer.is_closing():
                request = await read_request(reader)
                self.requests.append(request)
                self.targets.append(f"{request.method} {request.target}")
                if self.answer:
                    await self.answer(request, writer)
                elif refusal := self._refuse(request):
                    writer.write(refusal)
                elif request.method == "CONNECT":
                    up = await self._connect(request.target)
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    await asyncio.gather(_copy(reader, up[1]), _copy(up[0], writer))
                    return
                else:
                    address = urlsplit(request.target)
                    up = up or await self._connect(address.netloc)
                    await _pass_on(request, up, writer)
                await writer.drain()
        finally:
            if up:
                up[1].close()

    async def _connect(self, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port_of(target))

    def _refuse(self, request: Request) -> bytes | None:
        wanted = f"Basic {b64encode(self.login.encode()).decode()}" if self.login else None
        if request.headers.get("proxy-authorization") != wanted:
            return reply(407, b"", {"proxy-authenticate": 'Basic realm="x"'})
        return self.refusals.get(request.target) or self.refusals.get("")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while chunk := await reader.read(65_536):
            writer.write(chunk)
            await writer.drain()
    writer.close()


async def _pass_on(
    request: Request, up: tuple[asyncio.StreamReader, asyncio.StreamWriter], writer: asyncio.StreamWriter
) -> None:
    address = urlsplit(request.target)
    path = f"{address.path or '/'}{'?' if address.query else ''}{address.query}"
    lines = [f"{name}: {value}" for name, value in request.headers.items() if not name.startswith("proxy-")]
    up[1].write("\r\n".join([f"{request.method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + request.body)
    head = await up[0].readuntil(b"\r\n\r\n")
    length = next(
        (int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
    )
    writer.write(head + await up[0].readexactly(length))
