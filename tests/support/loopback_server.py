"""A server on loopback that serves one connection by one coroutine."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self


@dataclass(kw_only=True)
class LoopbackServer:
    """Calls `serve` for each connection. At the end it cancels those that are open."""

    schemes: ClassVar[tuple[str, str]]  #: without and with TLS from the first byte
    path: ClassVar[str] = ""
    context: ssl.SSLContext | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)  #: a connection has ended
    _busy: set[asyncio.Task[Any]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"{self.schemes[self.context is not None]}://127.0.0.1:{self.port}{self.path}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._busy:
            task.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)
        try:
            await self.serve(reader, writer)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self.gone.set()
            writer.close()
            with suppress(ConnectionError, ssl.SSLError, asyncio.CancelledError):
                await writer.wait_closed()
