"""Send one mail over SMTP with a total deadline, and know whether the relay may have taken it.

The border is the first byte of the message after the relay's 354. Before it nothing was delivered (RFC 5321, 4.1.1.4);
after it only a final reply decides. `aiosmtplib.SMTP.data` sends DATA and content in one call: a lost connection does
not show which of them failed. So DATA and content are sent in two steps here. aiosmtplib limits a reply to 32 KB.
"""

from __future__ import annotations

import asyncio
import ssl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import aiohappyeyeballs
import aiosmtplib
from django.core.mail.utils import DNS_NAME

from scheduling.channels.base import Delivered, DestinationRefused, Outcome, Permanent, Transient, Unknown
from scheduling.channels.http_client import excerpt, resolve_host
from scheduling.channels.kinds import thread_pool
from scheduling.channels.ssrf import PrivateHosts
from scheduling.error_text import ErrorText as _

AT_ONCE = 32  #: concurrent mails of one channel
THREADS = 1_024  #: for name lookups and Django's mail backend, created on demand: a mail whose time runs never waits
DEFAULT_PORTS = {"smtp": 25, "smtps": 465}
START_MAIL_INPUT = 354
NO_SUCH_MAILBOX = ("5.1.1", "5.1.6")  # RFC 3463: bad destination mailbox, mailbox has moved


@dataclass(frozen=True, slots=True)
class Relay:
    """The server that accepts the mail."""

    host: str
    port: int
    tls: bool = False  #: from the first byte (smtps)
    starttls: bool = False  #: required, not only tried
    user: str = ""
    password: str = ""
    guarded: bool = False  #: set by a channel editor: a private address needs an administrator's permission


def parse_relay(url: str) -> Relay:
    """Parse `smtp://user:password@host:587?tls=1` or `smtps://…`.

    Raises:
        ValueError: the URL is invalid; the message never contains the password.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ValueError(_("the port must be 1 to 65535")) from None
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.path not in {"", "/"}:
        raise ValueError(_("must look like smtp://user:password@host:587?tls=1 or smtps://user:password@host"))
    options = parse_qs(parts.query, keep_blank_values=True)
    if set(options) - {"tls"} or options.get("tls", ["0"])[-1] not in {"0", "1"}:
        raise ValueError(_("the only option is tls=0 or tls=1"))
    return Relay(
        parts.hostname,
        port or DEFAULT_PORTS[parts.scheme],
        parts.scheme == "smtps",
        parts.scheme == "smtp" and options.get("tls", ["0"])[-1] == "1",
        unquote(parts.username or ""),
        unquote(parts.password or ""),
    )


class ConversationStage(Enum):
    """The progress of a conversation."""

    GREETING = auto()  #: connecting, TLS, login: a refusal here concerns this sender, not the recipient
    ENVELOPE = auto()  #: sender and recipient
    CONTENT = auto()  #: the message may have been sent


class AbortingSMTP(aiosmtplib.SMTP):
    """A client whose `close` does not wait for the relay. asyncio's end of TLS would wait 30 s for it."""

    def close(self) -> None:
        if self.transport is not None:
            cast(asyncio.WriteTransport, self.transport).abort()
        super().close()


class Conversation:
    """Send one message to the relay."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._stage = ConversationStage.GREETING
        self._smtp: aiosmtplib.SMTP | None = None

    async def run(self, sender: str, recipient: str, content: bytes) -> Outcome:
        """Run the whole exchange. Raises nothing for behaviour of the network or the relay."""
        try:
            smtp = await self._connect()
            self._stage = ConversationStage.ENVELOPE
            await smtp.mail(sender)
            await smtp.rcpt(recipient)
            ready = await smtp.execute_command(b"DATA")
            if ready.code != START_MAIL_INPUT:
                return self._refused(*ready)
            code, said = await self._send_content(smtp, content)
            return Delivered(excerpt(_encode(said)), code) if code == 250 else self._refused(code, said)
        except DestinationRefused as refused:
            return refused.outcome()
        except aiosmtplib.SMTPResponseException as error:
            return self._refused(error.code, error.message)
        except OSError as error:
            cause = error.__cause__ or error
            return self.broken("tls" if isinstance(cause, ssl.SSLError) else "disconnected", cause)
        except aiosmtplib.SMTPException as error:
            return Transient("smtp_unsupported", excerpt(str(error)))

    async def _connect(self) -> aiosmtplib.SMTP:
        """Connect, start TLS and log in. A guarded relay is reached at a checked address only."""
        relay = self._relay
        addresses, context, name = await asyncio.get_running_loop().run_in_executor(mail_threads(), _prepare, relay)
        wire = await aiohappyeyeballs.start_connection(addresses)
        self._smtp = smtp = AbortingSMTP(
            hostname=relay.host,
            sock=wire,
            use_tls=relay.tls,
            start_tls=relay.starttls,
            tls_context=context,
            username=relay.user or None,
            password=relay.password,
            local_hostname=name,
            timeout=None,
        )
        await smtp.connect()
        if smtp.is_ehlo_or_helo_needed:  # `mail` would greet too, but its refusal would count against the recipient
            try:
                await smtp.ehlo()
            except aiosmtplib.SMTPHeloError:
                if not smtp.is_connected:  # the reply was 421
                    raise
                await smtp.helo()
        return smtp

    async def _send_content(self, smtp: aiosmtplib.SMTP, content: bytes) -> aiosmtplib.SMTPResponse:
        protocol = smtp.protocol
        if protocol is None or not protocol.is_connected:
            raise aiosmtplib.SMTPServerDisconnected("Connection lost")
        self._stage = ConversationStage.CONTENT
        protocol.write(_dot_stuff(content))
        return await protocol.read_response()

    def _refused(self, code: int, said: str) -> Outcome:
        """Return the outcome of a refusal: 4xx is transient, 5xx permanent.

        5xx at login or greeting is transient too: it concerns this sender, and an operator can correct it.
        """
        text = excerpt(_encode(said))
        if 500 <= code < 600 and self._stage is not ConversationStage.GREETING:
            return Permanent(f"smtp_{code}", text, code, disable_target=said.startswith(NO_SUCH_MAILBOX))
        if 400 <= code < 600:
            return Transient(f"smtp_{code}", text, status=code)
        return self.broken("garbled")

    def broken(self, reason: str, error: BaseException | None = None) -> Outcome:
        """Return the outcome of a conversation that ended without a reply."""
        detail = getattr(error, "strerror", None) or type(error).__name__ if error else ""
        if self._stage is ConversationStage.CONTENT:
            return Unknown(reason, detail)
        if self._stage is ConversationStage.GREETING and reason == "disconnected":
            return Transient("connect", detail)
        return Transient("connect_timeout" if reason == "timeout" else reason, detail)

    def hang_up(self) -> None:
        """Close without waiting for the reply to QUIT. Content that the relay has not read is dropped."""
        if self._smtp is None or self._smtp.transport is None:
            return
        transport = cast(asyncio.WriteTransport, self._smtp.transport)
        if self._smtp.protocol and self._smtp.is_connected and not transport.get_write_buffer_size():
            self._smtp.protocol.write(b"QUIT\r\n")
        self._smtp.close()


def _prepare(relay: Relay) -> tuple[list[tuple[Any, ...]], ssl.SSLContext, str]:
    """Return the usable addresses, the TLS settings and the name of this host. Blocks for seconds at worst."""
    found = resolve_host(relay.host, relay.port)
    if relay.guarded:
        usable = set(PrivateHosts.from_settings().usable(relay.host, relay.port, [str(each[-1][0]) for each in found]))
        found = [each for each in found if each[-1][0] in usable]
    return found, ssl.create_default_context(), str(DNS_NAME.get_fqdn())


async def deliver_mail(relay: Relay, sender: str, recipient: str, content: bytes, seconds: float) -> Outcome:
    """Deliver `content` (a whole message with CRLF lines). Return within `seconds`, for any behaviour of the relay."""
    conversation = Conversation(relay)
    try:
        async with asyncio.timeout(seconds):
            return await conversation.run(sender, recipient, content)
    except TimeoutError:
        return conversation.broken("timeout")
    finally:
        conversation.hang_up()


def _encode(said: str) -> bytes:
    return said.encode("utf-8", "surrogateescape")


def mail_threads() -> ThreadPoolExecutor:
    """Return a pool large enough that slow lookups and backends do not delay each other."""
    return thread_pool("mail", THREADS)


def _dot_stuff(content: bytes) -> bytes:
    """Return the content dot-stuffed and terminated (RFC 5321, 4.5.2). `content` already has CRLF line ends."""
    body = content.replace(b"\r\n.", b"\r\n..")
    if body.startswith(b"."):
        body = b"." + body
    return body + (b"" if body.endswith(b"\r\n") else b"\r\n") + b".\r\n"
