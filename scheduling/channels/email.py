"""Send a touch as plain-text mail through an SMTP relay.

Marketing mail carries the one-click unsubscribe headers of RFC 8058. `Message-ID` contains the delivery key, so a
repeat is recognisable. Receivers do not promise to check it, so `default_idempotent` is False.

Whether a relay may have taken the mail is decided at the first byte of the message after its 354. Before it nothing was
delivered (RFC 5321, 4.1.1.4); after it only a final reply decides. `aiosmtplib.SMTP.data` sends DATA and content in one
call: a lost connection does not show which of them failed. So DATA and content are sent in two steps here. aiosmtplib
limits a reply to 32 KB.
"""

from __future__ import annotations

import asyncio
import ssl
import unicodedata
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from email.charset import BASE64, Charset
from email.utils import formataddr, parseaddr
from enum import Enum, auto
from typing import Any, ClassVar, cast
from urllib.parse import parse_qs, unquote, urlsplit

import aiohappyeyeballs
import aiosmtplib
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.mail import EmailMessage
from django.core.mail.message import sanitize_address
from django.core.mail.utils import DNS_NAME
from django.core.signing import BadSignature
from django.core.validators import validate_email
from django.utils.crypto import salted_hmac

from scheduling.channels import options
from scheduling.channels.base import (
    Channel,
    Delivered,
    DestinationRefused,
    InvalidSetting,
    Message,
    Outcome,
    Permanent,
    Transient,
    Unknown,
    thread_pool,
)
from scheduling.channels.http_client import excerpt, resolve_host
from scheduling.channels.ssrf import PrivateHosts
from scheduling.error_text import ErrorText as _

AT_ONCE = 32  #: concurrent mails of one channel
THREADS = 1_024  #: for name lookups, created on demand: a mail whose time runs never waits
DEFAULT_PORTS = {"smtp": 25, "smtps": 465}
LOCAL_RELAY = "smtp://localhost"
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
    password: str = field(default="", repr=False)
    guarded: bool = False  #: set by a channel editor: a private address needs an administrator's permission


_RELAY_FORM = _("must look like smtp://user:password@host:587?tls=1 or smtps://user:password@host")


def parse_relay(url: str) -> Relay:
    """Parse `smtp://user:password@host:587?tls=1` or `smtps://…`.

    Raises:
        ValueError: the URL is invalid; the message never contains the password.
    """
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # as the resolver will: no empty and no long label
    except ValueError:  # its message may contain the password, with a full-width “：” for example
        raise ValueError(_RELAY_FORM) from None
    try:
        port = parts.port
    except ValueError:
        raise ValueError(_("the port must be 1 to 65535")) from None
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.path not in {"", "/"}:
        raise ValueError(_RELAY_FORM)
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

    async def run(self, sender: str, recipient: str, content: bytes, seconds: float) -> Outcome:
        """Send `content`, a whole message with CRLF lines, within `seconds`.

        Raises nothing for behaviour of the network or the relay.
        """
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await self._exchange(sender, recipient, content)
        except DestinationRefused as refused:
            return refused.outcome()
        except aiosmtplib.SMTPResponseException as error:
            return self._refused(error.code, error.message)
        except OSError as error:
            if limit.expired():
                return self.broken("timeout")
            cause = error.__cause__ or error
            return self.broken("tls" if isinstance(cause, ssl.SSLError) else "disconnected", cause)
        except aiosmtplib.SMTPException as error:
            return Transient("smtp_unsupported", excerpt(str(error)))
        finally:
            self._hang_up()

    async def _exchange(self, sender: str, recipient: str, content: bytes) -> Outcome:
        smtp = await self._connect()
        self._stage = ConversationStage.ENVELOPE
        await smtp.mail(sender)
        await smtp.rcpt(recipient)
        ready = await smtp.execute_command(b"DATA")
        if ready.code != START_MAIL_INPUT:
            return self._refused(*ready)
        protocol = smtp.protocol
        if protocol is None or not protocol.is_connected:
            raise aiosmtplib.SMTPServerDisconnected("Connection lost")
        self._stage = ConversationStage.CONTENT
        # Dot-stuffed and terminated (RFC 5321, 4.5.2). `content` already has CRLF line ends.
        stuffed = content.replace(b"\r\n.", b"\r\n..")
        if stuffed.startswith(b"."):
            stuffed = b"." + stuffed
        protocol.write(stuffed + (b"" if stuffed.endswith(b"\r\n") else b"\r\n") + b".\r\n")
        code, said = await protocol.read_response()
        return Delivered(excerpt(_encode(said)), code) if code == 250 else self._refused(code, said)

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

    def _hang_up(self) -> None:
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


def _encode(said: str) -> bytes:
    return said.encode("utf-8", "surrogateescape")


def mail_threads() -> ThreadPoolExecutor:
    """Return a pool large enough that slow lookups do not delay each other."""
    return thread_pool("mail", THREADS)


SALT = "unsubscribe"


def make_token(user_id: str) -> str:
    """Encrypt and sign `user_id` into a URL-safe token.

    Mail is forwarded and logged, so the token hides the id. It never expires: the link in an old mail keeps working.
    Reading needs its key in `SECRET_KEY` or `SECRET_KEY_FALLBACKS`.
    """
    return _build_token_cipher().encrypt(user_id.encode()).decode().rstrip("=")


def read_token(token: str) -> str:
    """Return the user id of a token.

    Raises:
        BadSignature: `make_token` did not make it, or its key is gone.
    """
    try:
        return _build_token_cipher().decrypt(token + "=" * (-len(token) % 4)).decode()
    except (InvalidToken, ValueError) as error:
        raise BadSignature("not a token") from error


def _build_token_cipher() -> MultiFernet:
    """Derive keys for this purpose only from the site's keys."""
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    derived = [salted_hmac(SALT, "", secret=key, algorithm="sha256").digest() for key in keys]
    return MultiFernet([Fernet(urlsafe_b64encode(key)) for key in derived])


SUBJECT_LENGTH = 200  # characters
ADDRESS_LENGTH = 254  # characters, RFC 5321 by way of erratum 1690 to RFC 3696
MARKETING = "marketing"
UTF8 = Charset("utf-8")
UTF8.body_encoding = BASE64  # avoids 8-bit bytes and long lines, which some relays reject


class Email(Channel):
    """Mail. Config: `from` and `reply_to` (addresses; `from` may have a name), `url` of a relay, and `bounces_to`, the
    envelope's sender, which gets the bounces that `receipts` reads.

    Defaults: `DEFAULT_FROM_EMAIL`, none, `AFTERTOUCH_EMAIL_URL` or a relay on this host. Only these may lead into
    the private network without `AFTERTOUCH_ALLOWED_PRIVATE_HOSTS`. A user who edits a channel must not scan that
    network.
    """

    kind: ClassVar[str] = "email"
    needs_target = True
    address_key = "email"
    secret_fields = frozenset({"url"})
    at_once = AT_ONCE

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        super().__init__(config, timeout)
        options.check_known_keys(config, {"from", "reply_to", "bounces_to", "url"})
        self._from = options.read_text(config, "from") or settings.DEFAULT_FROM_EMAIL
        self._reply_to = options.read_text(config, "reply_to")
        try:
            sanitize_address(self._from, "utf-8")
            name, self._address = parseaddr(self._from)
        except (ValueError, TypeError):  # no address, or several
            name = self._address = ""
        _check_address(self._address if self._from == one_line(self._from) else "", "from")
        self._from = formataddr((name, self._address))  # as relays take it
        if self._reply_to:
            _check_address(self._reply_to, "reply_to")
        self._bounces_to = options.read_text(config, "bounces_to")
        if self._bounces_to:
            _check_address(self._bounces_to, "bounces_to")
        own = options.read_text(config, "url")
        try:
            self._relay = replace(parse_relay(own or settings.AFTERTOUCH_EMAIL_URL or LOCAL_RELAY), guarded=bool(own))
        except ValueError as error:
            raise InvalidSetting("url", str(error)) from None

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check that `address` is one plain mail address."""
        options.check_known_keys(target, {"address"})
        _check_address(options.read_text(target, "address"), "address")

    def target_key(self, message: Message) -> str:
        """Return the relay: it can be slow or dead. The mailbox behind it is not visible."""
        return f"{self.kind}:{self._relay.host}:{self._relay.port}"

    async def attempt(self, message: Message) -> Outcome:
        """Try once. Return `Unknown` if the content was sent and the relay's reply did not come."""
        self.validate_target(message.target)
        mail = self.compose(message)
        sender = sanitize_address(self._bounces_to or self._address, "utf-8")
        recipient = sanitize_address(str(message.target["address"]), "utf-8")
        content = mail.message().as_bytes().replace(b"\n", b"\r\n")  # base64 contains no other line end
        return await Conversation(self._relay).run(sender, recipient, content, self.timeout.total_seconds())

    def compose(self, message: Message) -> EmailMessage:
        """Return the mail. Line breaks and control characters become spaces, so that no text can add a header."""
        base = settings.AFTERTOUCH_BASE_URL.rstrip("/")
        domain = urlsplit(base).hostname or self._address.rpartition("@")[2]
        headers = {"Message-ID": f"<{message.delivery_key}@{domain}>", "Auto-Submitted": "auto-generated"}
        if base and message.category == MARKETING:
            link = f"{base}/u/{make_token(message.user_id)}"
            headers |= {"List-Unsubscribe": f"<{link}>", "List-Unsubscribe-Post": "List-Unsubscribe=One-Click"}
        mail = EmailMessage(
            subject=one_line(message.subject) or one_line(message.body),
            body=message.body,
            from_email=self._from,
            to=[str(message.target["address"])],
            reply_to=[self._reply_to] if self._reply_to else None,
            headers=headers,
        )
        mail.encoding = UTF8
        return mail


def one_line(text: str) -> str:
    """Return a text for a header: one line, no control characters and no surrogates, at most 200 characters."""
    visible = "".join(" " if unicodedata.category(letter) in {"Cc", "Zl", "Zp", "Cs"} else letter for letter in text)
    return " ".join(visible.split())[:SUBJECT_LENGTH]


def is_mail_address(text: str) -> bool:
    """Return whether a text is one plain address that a relay takes: its domain has a form in ASCII."""
    try:
        validate_email(text)
        sanitize_address(text, "utf-8")
    except (ValidationError, ValueError):
        return False
    return len(text) <= ADDRESS_LENGTH and text.isprintable()  # the encoded domain drops what is invisible


def _check_address(address: str, field: str) -> None:
    if not is_mail_address(address):
        raise InvalidSetting(field, _("must be one mail address"))
