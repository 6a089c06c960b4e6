"""A TCP proxy that can drop all data of both sides, as when a cable is pulled, until it is restored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from tests.support.waiting import WAIT_LIMIT


@dataclass
class CuttableLink:
    """Carries connections to one server."""

    host: str
    port: int
    address: str = ""  #: where it listens
    _whole: asyncio.Event = field(default_factory=asyncio.Event)

    async def forward(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        writers = [back]
        try:
            await self._whole.wait()
            far, forth = await asyncio.open_connection(self.host, self.port)
            writers.append(forth)
            await asyncio.gather(self._pass_on(near, forth), self._pass_on(far, back))
        except (OSError, asyncio.CancelledError):
            pass  # the server is unavailable, or the test is over
        finally:
            for writer in writers:
                writer.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                await self._whole.wait()
                target.write(data)
                await target.drain()
        await self._whole.wait()  # the end of the other side is not passed on either
        target.close()


@dataclass
class CuttableLinks:
    """All that a node needs to reach."""

    loop: asyncio.AbstractEventLoop
    links: list[CuttableLink]

    def cut(self) -> None:
        for link in self.links:
            self.loop.call_soon_threadsafe(link._whole.clear)

    def restore(self) -> None:
        for link in self.links:
            self.loop.call_soon_threadsafe(link._whole.set)

    def through(self, url: str) -> str:
        """The same address, by way of the wire that leads there."""
        parts = urlsplit(url)
        link = next(link for link in self.links if (link.host, link.port) == (parts.hostname, parts.port))
        sign_in = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{sign_in}@{link.address}"))


@contextmanager
def links_to(*urls: str) -> Iterator[CuttableLinks]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="wires")
    thread.start()
    links = [CuttableLink(parts.hostname or "", parts.port or 0) for parts in map(urlsplit, urls)]
    servers: list[asyncio.Server] = []
    try:
        servers += [asyncio.run_coroutine_threadsafe(_serve(link), loop).result(WAIT_LIMIT) for link in links]
        yield CuttableLinks(loop, links)
    finally:
        asyncio.run_coroutine_threadsafe(_end(servers), loop).result(WAIT_LIMIT)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_LIMIT)
        loop.close()


async def _serve(link: CuttableLink) -> asyncio.Server:
    server = await asyncio.start_server(link.forward, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    link.address = f"{host}:{port}"
    link._whole.set()
    return server


async def _end(servers: list[asyncio.Server]) -> None:
    for server in servers:
        server.close()
    mine = asyncio.current_task()
    while left := [task for task in asyncio.all_tasks() if task is not mine]:
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0.05)  # what was accepted in the last moment, and transports that close
