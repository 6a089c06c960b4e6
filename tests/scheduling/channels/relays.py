"""SMTP servers on loopback: one that takes mail, and all the ways not to."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.scheduling.channels.http_receivers import reset
from tests.support.loopback_server import LoopbackServer

Hook = Callable[["SmtpDialog"], Awaitable[str | None]]


@dataclass
class SmtpDialog:
    """One connection: the client's lines, and methods to respond."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    said: list[str] = field(default_factory=list)
    content: bytes = b""

    def send_line(self, line: str) -> None:
        self.writer.write(line.encode() + b"\r\n")

    def reset_connection(self) -> None:
        reset(self.writer)


@dataclass
class RelayServer(LoopbackServer):
    """Accepts every mail, unless `answers` has another line or a hook for a verb (GREETING, EHLO, MAIL … and END)."""

    schemes = ("smtp", "smtps")
    answers: dict[str, str | Hook] = field(default_factory=dict)
    starttls: ssl.SSLContext | None = None
    mails: list[SmtpDialog] = field(default_factory=list)
    talks: list[SmtpDialog] = field(default_factory=list)

    async def await_client_close(self) -> None:
        """The client has hung up. On a slow machine a deadline may end before any call."""
        if self.talks:
            await self.gone.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialog = SmtpDialog(reader, writer)
        self.talks.append(dialog)
        await self._answer(dialog, "GREETING", "220 relay.test ESMTP")
        while line := (await reader.readline()).decode().strip():
            dialog.said.append(line)
            await self._command(dialog, line.split(" ")[0].upper())

    async def _command(self, dialog: SmtpDialog, verb: str) -> None:
        if verb == "EHLO":
            offers = "".join(f"250-{offer}\r\n" for offer in ("STARTTLS",) if self.starttls)
            await self._answer(dialog, verb, f"250-relay.test\r\n{offers}250-AUTH PLAIN\r\n250 SIZE 1000000")
        elif verb == "STARTTLS":
            dialog.send_line("220 go ahead")
            await dialog.writer.start_tls(self.starttls)
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
