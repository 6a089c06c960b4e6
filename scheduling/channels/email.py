"""Send a touch as plain-text mail, through an SMTP relay or, without one, Django's mail backend.

Marketing mail carries the one-click unsubscribe headers of RFC 8058. `Message-ID` contains the delivery key, so a
repeat is recognisable. Receivers do not promise to check it, so `default_idempotent` is False.
"""

from __future__ import annotations

import asyncio
import unicodedata
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from email.charset import BASE64, Charset
from email.utils import parseaddr
from functools import lru_cache
from typing import Any, ClassVar
from urllib.parse import urlsplit

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.mail import EmailMessage, get_connection
from django.core.mail.message import sanitize_address
from django.core.signing import BadSignature
from django.core.validators import validate_email
from django.utils.crypto import salted_hmac

from scheduling.channels import options
from scheduling.channels.base import Delivered, InvalidSetting, Message, Outcome, Permanent, Quota, Transient, Unknown
from scheduling.channels.smtp import AT_ONCE, Relay, deliver_mail, mail_threads, parse_relay
from scheduling.error_text import ErrorText as _

SALT = "unsubscribe"


def make_token(user_id: str) -> str:
    """Encrypt and sign `user_id` into a URL-safe token.

    Mail is forwarded and logged, so the token hides the id. It never expires: the link in an old mail keeps working.
    Reading needs its key in `SECRET_KEY` or `SECRET_KEY_FALLBACKS`.
    """
    return _token_cipher().encrypt(user_id.encode()).decode().rstrip("=")


def read_token(token: str) -> str:
    """Return the user id of a token.

    Raises:
        BadSignature: `make_token` did not make it, or its key is gone.
    """
    try:
        return _token_cipher().decrypt(token + "=" * (-len(token) % 4)).decode()
    except (InvalidToken, ValueError) as error:
        raise BadSignature("not a token") from error


def _token_cipher() -> MultiFernet:
    return _token_cipher_for((settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS))


@lru_cache(maxsize=4)
def _token_cipher_for(keys: tuple[str, ...]) -> MultiFernet:
    """Derive keys for this purpose only from the site's keys."""
    derived = [salted_hmac(SALT, "", secret=key, algorithm="sha256").digest() for key in keys]
    return MultiFernet([Fernet(urlsafe_b64encode(key)) for key in derived])


def unsubscribe_url(user_id: str) -> str:
    """Return the link, or "" without `AFTERTOUCH_BASE_URL`."""
    base = settings.AFTERTOUCH_BASE_URL.rstrip("/")
    return f"{base}/u/{make_token(user_id)}" if base else ""


SUBJECT_LENGTH = 200  # characters
ADDRESS_LENGTH = 254  # characters, RFC 5321 by way of erratum 1690 to RFC 3696
MARKETING = "marketing"
UTF8 = Charset("utf-8")
UTF8.body_encoding = BASE64  # avoids 8-bit bytes and long lines, which some relays reject


class Email:
    """Mail. Config: `from` and `reply_to` (addresses; `from` may have a name), `url` of a relay, and `bounces_to`, the
    envelope's sender, which gets the bounces that `receipts.bounce_mail` reads.

    Defaults: `DEFAULT_FROM_EMAIL`, none, `AFTERTOUCH_EMAIL_URL`. Only the latter may lead into the private network
    without `AFTERTOUCH_ALLOWED_PRIVATE_HOSTS`. A user who edits a channel must not scan that network.
    """

    kind: ClassVar[str] = "email"
    needs_target: ClassVar[bool] = True
    address_key: ClassVar[str] = "email"
    quotas: ClassVar[tuple[Quota, ...]] = ()
    secret_fields: ClassVar[frozenset[str]] = frozenset({"url"})
    default_idempotent: ClassVar[bool] = False
    at_once: ClassVar[int] = AT_ONCE

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        options.check_known_keys(config, {"from", "reply_to", "bounces_to", "url"})
        self._from = options.read_text(config, "from") or settings.DEFAULT_FROM_EMAIL
        self._reply_to = options.read_text(config, "reply_to")
        _check_address(parseaddr(self._from)[1] if self._from == one_line(self._from) else "", "from")
        if self._reply_to:
            _check_address(self._reply_to, "reply_to")
        self._bounces_to = options.read_text(config, "bounces_to")
        if self._bounces_to:
            _check_address(self._bounces_to, "bounces_to")
        own = options.read_text(config, "url")
        self._relay = _parse_relay_setting(own or settings.AFTERTOUCH_EMAIL_URL, guarded=bool(own))
        self._timeout = options.check_positive(timeout)

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check that `address` is one plain mail address.

        Raises:
            InvalidSetting: the address is not accepted.
        """
        options.check_known_keys(target, {"address"})
        _check_address(options.read_text(target, "address"), "address")

    def target_key(self, message: Message) -> str:
        """Return the relay: it can be slow or dead. The mailbox behind it is not visible."""
        return f"{self.kind}:{self._relay.host}:{self._relay.port}" if self._relay else self.kind

    async def send(self, message: Message, deadline: datetime) -> Outcome:
        """Try once. Return `Unknown` if the content was sent and the relay's reply did not come."""
        left = options.time_left(deadline, self._timeout)
        if left <= timedelta(0):
            return Transient("no_time", "the deadline had passed before the mail was sent")
        try:
            self.validate_target(message.target)
        except ValueError as error:
            return Permanent("bad_target", str(error))
        mail = self.compose(message)
        if self._relay is None:
            return await _send_by_django(mail, left.total_seconds())
        sender = sanitize_address(self._bounces_to or parseaddr(self._from)[1], "utf-8")
        recipient = sanitize_address(str(message.target["address"]), "utf-8")
        content = mail.message().as_bytes().replace(b"\n", b"\r\n")  # base64 contains no other line end
        return await deliver_mail(self._relay, sender, recipient, content, left.total_seconds())

    def compose(self, message: Message) -> EmailMessage:
        """Return the mail. Line breaks and control characters become spaces, so that no text can add a header."""
        headers = {"Message-ID": f"<{message.delivery_key}@{self._domain()}>", "Auto-Submitted": "auto-generated"}
        link = unsubscribe_url(message.user_id) if message.category == MARKETING else ""
        if link:
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

    def _domain(self) -> str:
        return urlsplit(settings.AFTERTOUCH_BASE_URL).hostname or parseaddr(self._from)[1].rpartition("@")[2]


def one_line(text: str) -> str:
    """Return a text for a header: one line, no control or format characters, at most 200 characters."""
    visible = "".join(" " if unicodedata.category(letter) in {"Cc", "Zl", "Zp", "Cs"} else letter for letter in text)
    return " ".join(visible.split())[:SUBJECT_LENGTH]


async def _send_by_django(mail: EmailMessage, seconds: float) -> Outcome:
    sending = asyncio.get_running_loop().run_in_executor(mail_threads(), get_connection().send_messages, [mail])
    done, _ = await asyncio.wait({sending}, timeout=seconds)
    if not done:
        return Unknown("timeout", "the mail backend did not return in time")
    error = sending.exception()
    return Unknown("mail_backend", type(error).__name__) if error else Delivered("handed to the mail backend")


def _parse_relay_setting(url: str, *, guarded: bool) -> Relay | None:
    try:
        return replace(parse_relay(url), guarded=guarded) if url else None
    except ValueError as error:
        raise InvalidSetting("url", str(error)) from None


def _check_address(address: str, field: str) -> None:
    try:
        validate_email(address)
    except ValidationError:
        address = ""
    if not address or len(address) > ADDRESS_LENGTH:
        raise InvalidSetting(field, _("must be one mail address"))
