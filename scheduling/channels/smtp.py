"""Send one mail over SMTP with a total deadline, and know whether the relay may have taken it.

smtplib blocks, so it runs in a thread. Its timeouts apply to each read, so another thread ends a dripping server by
shutting the socket down. The border is the first byte of the message after the relay's 354. Before it nothing was
delivered (RFC 5321, 4.1.1.4); after it only a final reply decides. aiosmtplib also bounds replies, but one call sends
DATA and content: a lost connection does not show which of them failed.
"""

from __future__ import annotations

import asyncio
import smtplib
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from threading import Lock
from time import monotonic
from urllib.parse import parse_qs, unquote, urlsplit

from django.core.mail.utils import DNS_NAME

from scheduling.channels.base import Delivered, DestinationRefused, Outcome, Permanent, Transient, Unknown
from scheduling.channels.http_client import excerpt, resolve_host
from scheduling.channels.registry import thread_pool
from scheduling.channels.ssrf import PrivateHosts

AT_ONCE = 32  #: concurrent mails of one channel, each in a thread
THREADS = 1_024  #: of all channels, created on demand: a mail whose time runs never waits for a thread
DEFAULT_PORTS = {"smtp": 25, "smtps": 465}
START_MAIL_INPUT = 354
MAX_REPLY = 32_768  #: bytes of one reply with all its lines; RFC 5321 requires lines of 512
MAX_REPLY_LINES = 100
NO_SUCH_MAILBOX = (b"5.1.1", b"5.1.6")  # RFC 3463: bad destination mailbox, mailbox has moved


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
        raise ValueError("the port must be 1 to 65535") from None
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.path not in {"", "/"}:
        raise ValueError("must look like smtp://user:password@host:587?tls=1 or smtps://user:password@host")
    options = parse_qs(parts.query, keep_blank_values=True)
    if set(options) - {"tls"} or options.get("tls", ["0"])[-1] not in {"0", "1"}:
        raise ValueError("the only option is tls=0 or tls=1")
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


class Abandoned(Exception):
    """The caller stopped waiting. Nothing more may be sent."""


class ReplyTooLong(smtplib.SMTPException):
    """The relay's reply exceeds `MAX_REPLY` or `MAX_REPLY_LINES`."""


class BoundedSMTP(smtplib.SMTP):
    """smtplib with a limit for the number of reply lines; smtplib limits only their length."""

    def getreply(self) -> tuple[int, bytes]:
        """Return code and text of the reply.

        Raises:
            ReplyTooLong: also for one long line, which smtplib reports as a refusal with code 500.
        """
        if self.file is None:
            self.file = self.sock.makefile("rb")  # type: ignore[union-attr]
        said: list[bytes] = []
        left = MAX_REPLY
        while len(said) < MAX_REPLY_LINES:
            try:
                line = self.file.readline(left + 1)
            except OSError:
                line = b""
            if not line:
                self.close()
                raise smtplib.SMTPServerDisconnected("Connection unexpectedly closed")
            left -= len(line)
            if left < 0:
                break
            said.append(line[4:].strip(b" \t\r\n"))
            if not line[:3].isdigit():
                return -1, b"\n".join(said)
            if line[3:4] != b"-":
                return int(line[:3]), b"\n".join(said)
        raise ReplyTooLong


class Conversation:
    """Send one message to the relay. `run` is for the worker thread, `abandon` for the waiting caller."""

    def __init__(self, relay: Relay, sender: str, recipient: str, content: bytes, deadline: float) -> None:
        self._relay, self._sender, self._recipient, self._content = relay, sender, recipient, content
        self._deadline = deadline  # monotonic seconds
        self._lock = Lock()
        self._stage = ConversationStage.GREETING
        self._abandoned = False
        self._line: socket.socket | None = None
        self._smtp = BoundedSMTP(local_hostname="localhost")

    def run(self) -> Outcome:
        """Run the whole exchange. Raises nothing for behaviour of the network or the relay."""
        try:
            self._enter(ConversationStage.GREETING)
            self._connect()
            self._enter(ConversationStage.ENVELOPE)
            return self._send()
        except smtplib.SMTPResponseException as error:
            return self._refused(error.smtp_code, error.smtp_error)
        except smtplib.SMTPNotSupportedError as error:
            return Transient("smtp_unsupported", excerpt(str(error)))
        except Abandoned:
            return self._broken("timeout")
        except DestinationRefused as refused:
            return refused.outcome()
        except ReplyTooLong:
            return self._broken("garbled")
        except (OSError, smtplib.SMTPException) as error:
            return self._broken("tls" if isinstance(error, ssl.SSLError) else "disconnected", error)
        finally:
            self._hang_up()

    def abandon(self) -> Outcome:
        """End the conversation now. The result is final: afterwards the thread cannot start to send the message."""
        with self._lock:
            self._abandoned = True
            if self._line is not None:
                with suppress(OSError):
                    self._line.shutdown(socket.SHUT_RDWR)
        return self._broken("timeout")

    def _connect(self) -> None:
        relay, context = self._relay, ssl.create_default_context()
        wire: socket.socket = self._open_shared_socket()
        if relay.tls:
            wire = context.wrap_socket(wire, server_hostname=relay.host)
        smtp = self._smtp
        # the result is cached; the lookup runs in this thread because it can take seconds
        smtp.local_hostname = DNS_NAME.get_fqdn()
        smtp.sock = wire
        smtp._host = relay.host  # type: ignore[attr-defined]  # what only its own connect() sets; STARTTLS checks it
        code, said = smtp.getreply()
        if code != 220:
            raise smtplib.SMTPConnectError(code, said)
        smtp.ehlo_or_helo_if_needed()
        if relay.starttls:
            smtp.starttls(context=context)
            smtp.ehlo()
        if relay.user:
            smtp.login(relay.user, relay.password)

    def _open_shared_socket(self) -> socket.socket:
        """Connect and keep a second handle. TLS takes over the first one, and `abandon` must still reach the socket."""
        wire = self._open_socket()
        with self._lock:
            if not self._abandoned:
                self._line = wire.dup()
                return wire
        wire.close()
        raise Abandoned

    def _open_socket(self) -> socket.socket:
        """Connect. For a guarded relay use exactly the checked addresses."""
        relay = self._relay
        if not relay.guarded:
            return socket.create_connection((relay.host, relay.port), self._time_left())
        addresses = [str(found[-1][0]) for found in resolve_host(relay.host, relay.port)]
        error = OSError("no address")
        for address in PrivateHosts.from_settings().usable(relay.host, relay.port, addresses):
            try:
                return socket.create_connection((address, relay.port), self._time_left())
            except OSError as failed:
                error = failed
        raise error

    def _send(self) -> Outcome:
        smtp = self._smtp
        for code, said in (smtp.mail(self._sender), smtp.rcpt(self._recipient)):
            if code not in (250, 251):
                return self._refused(code, said)
        code, said = smtp.docmd("DATA")
        if code != START_MAIL_INPUT:
            return self._refused(code, said)
        self._enter(ConversationStage.CONTENT)
        smtp.send(_dot_stuff(self._content))
        code, said = smtp.getreply()
        return Delivered(excerpt(said), code) if code == 250 else self._refused(code, said)

    def _enter(self, stage: ConversationStage) -> None:
        with self._lock:
            if self._abandoned:
                raise Abandoned
            self._stage = stage

    def _time_left(self) -> float:
        left = self._deadline - monotonic()
        if left <= 0:
            raise Abandoned
        return left

    def _refused(self, code: int, said: bytes | str) -> Outcome:
        """Return the outcome of a refusal: 4xx is transient, 5xx permanent.

        5xx at login or greeting is transient too: it concerns this sender, and an operator can correct it.
        """
        text = excerpt(said)
        if 500 <= code < 600 and self._stage is not ConversationStage.GREETING:
            gone = isinstance(said, bytes) and said.startswith(NO_SUCH_MAILBOX)
            return Permanent(f"smtp_{code}", text, code, disable_target=gone)
        if 400 <= code < 600:
            return Transient(f"smtp_{code}", text, status=code)
        return self._broken("garbled")

    def _broken(self, reason: str, error: Exception | None = None) -> Outcome:
        detail = getattr(error, "strerror", None) or type(error).__name__ if error else ""
        if self._stage is ConversationStage.CONTENT:
            return Unknown(reason, detail)
        if self._stage is ConversationStage.GREETING and reason == "disconnected":
            return Transient("connect", detail)
        return Transient("connect_timeout" if reason == "timeout" else reason, detail)

    def _hang_up(self) -> None:
        """Close without waiting for the reply to QUIT, for which a dripping relay would hold the thread."""
        with suppress(OSError, smtplib.SMTPException):
            self._smtp.putcmd("QUIT")
        self._smtp.close()
        with self._lock:
            if self._line is not None:
                self._line.close()
                self._line = None


async def deliver_mail(relay: Relay, sender: str, recipient: str, content: bytes, seconds: float) -> Outcome:
    """Deliver `content` (a whole message with CRLF lines). Return within `seconds`, for any behaviour of the relay."""
    conversation = Conversation(relay, sender, recipient, content, monotonic() + seconds)
    running = asyncio.get_running_loop().run_in_executor(mail_threads(), conversation.run)
    try:
        done, _ = await asyncio.wait({running}, timeout=seconds)
    except asyncio.CancelledError:
        conversation.abandon()
        raise
    return running.result() if done else conversation.abandon()


def mail_threads() -> ThreadPoolExecutor:
    """Return a pool large enough that slow relays do not delay each other."""
    return thread_pool("mail", THREADS)


def _dot_stuff(content: bytes) -> bytes:
    """Return the content dot-stuffed and terminated (RFC 5321, 4.5.2). `content` already has CRLF line ends."""
    body = content.replace(b"\r\n.", b"\r\n..")
    if body.startswith(b"."):
        body = b"." + body
    return body + (b"" if body.endswith(b"\r\n") else b"\r\n") + b".\r\n"
