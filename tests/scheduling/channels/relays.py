"""SMTP servers on loopback: one that takes mail, and all the ways not to."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.scheduling.channels.receivers import reset

Hook = Callable[["SmtpDialog"], Awaitable[str | None]]


@dataclass
class SmtpDialog:
    """One connection: what the client said, and the means to answer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    said: list[str] = field(default_factory=list)
    content: bytes = b""

    def send_line(self, line: str) -> None:
        self.writer.write(line.encode() + b"\r\n")

    def reset_connection(self) -> None:
        reset(self.writer)


@dataclass
class RelayServer:
    """Accepts every mail, unless `answers` has another line or a hook for a verb (GREETING, EHLO, MAIL … and END)."""

    answers: dict[str, str | Hook] = field(default_factory=dict)
    context: ssl.SSLContext | None = None  #: TLS from the first byte
    starttls: ssl.SSLContext | None = None
    mails: list[SmtpDialog] = field(default_factory=list)
    talks: list[SmtpDialog] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    _busy: set[asyncio.Task[Any]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'smtps' if self.context else 'smtp'}://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._busy:
            task.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)
        await self._server.wait_closed()

    async def await_client_close(self) -> None:
        """The one who called has hung up. On a machine that stalls a deadline may be over before anybody calls."""
        if self.talks:
            await self.gone.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)
        dialog = SmtpDialog(reader, writer)
        self.talks.append(dialog)
        try:
            await self._answer(dialog, "GREETING", "220 relay.test ESMTP")
            while line := (await reader.readline()).decode().strip():
                dialog.said.append(line)
                await self._command(dialog, line.split(" ")[0].upper())
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self.gone.set()
            writer.close()
            with suppress(ConnectionError, ssl.SSLError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _command(self, dialog: SmtpDialog, verb: str) -> None:
        if verb == "EHLO":
            offers = "".join(f"250-{offer}\r\n" for offer in ("STARTTLS",) if self.starttls)
            await self._answer(dialog, verb, f"250-relay.test\r\n{offers}250-AUTH PLAIN\r\n250 SIZE 1000000")
        elif verb == "STARTTLS":
            dialog.send_line("220 go ahead")
            await dialog.writer.start_tls(self.starttls)  # type: ignore[arg-type]
        elif verb == "DATA":
            await self._answer(dialog, verb, "354 go ahead")
            dialog.content = await dialog.reader.readuntil(b"\r\n.\r\n")
            await self._answer(dialog, "END", "250 2.0.0 queued as 1")
            self.mails.append(dialog)
        else:
            await self._answer(dialog, verb, {"AUTH": "235 welcome", "QUIT": "221 bye"}.get(verb, "250 2.1.0 ok"))

    async def _answer(self, dialog: SmtpDialog, verb: str, usual: str) -> None:
        answer = self.answers.get(verb, usual)
        line = answer if isinstance(answer, str) else await answer(dialog)
        if line:
            dialog.send_line(line)
            await dialog.writer.drain()
        if verb == "DATA" and not (line or "").startswith("354"):
            raise asyncio.IncompleteReadError(b"", None)
