"""Read what vendors report by calling us: receipts of messages, and messages of customers.

A repeated call has no second effect, because receipts and messages have ids. A call of WeCom or WeChat that is older
than `LONGEST_AGE` is refused. Their calls are signed by SHA-1 over sorted parts, and encrypted by AES-256-CBC.
Sources: developer.work.weixin.qq.com/document/path/90968 (scheme), 90930 (verification of the address);
developers.weixin.qq.com/doc/offiaccount/Message_Management/Message_encryption_and_decryption_instructions.html.
"""

from __future__ import annotations

import binascii
import hashlib
import json
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID
from xml.etree.ElementTree import Element, ParseError, fromstring
from zoneinfo import ZoneInfo

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from django.utils.crypto import constant_time_compare

from scheduling.channels.base import InvalidSetting
from scheduling.error_text import ErrorText as _

KEY_LENGTH = 43  # characters of the EncodingAESKey
PADDING = 32  # bytes; the scheme pads to this instead of the block size of AES
HEAD = 16  # random bytes before the length


class CallbackRefused(Exception):
    """The request is not from the vendor, or not for this account. The answer gives no reason."""


def read_key(text: str) -> bytes:
    """Return the AES key of an EncodingAESKey.

    Raises:
        ValueError: it is not 43 letters and digits.
    """
    try:
        key = b64decode(text + "=", validate=True) if len(text) == KEY_LENGTH and text.isascii() else b""
    except binascii.Error:
        key = b""
    if len(key) != PADDING:
        raise ValueError(_("must have %(length)s letters and digits", length=KEY_LENGTH))
    return key


def check_signature(given: str, *parts: str) -> None:
    """Raise `CallbackRefused` unless `given` is the signature of the parts."""
    expected = hashlib.sha1("".join(sorted(parts)).encode()).hexdigest()  # noqa: S324  the vendor's scheme
    if not constant_time_compare(given, expected):
        raise CallbackRefused


def decrypt(text: str, key: bytes, receiver: str) -> bytes:
    """Return the content of an encrypted text for this receiver: the id of the corporation or the application.

    Raises:
        CallbackRefused: it is not such a text, or for another receiver.
    """
    try:
        sealed = b64decode(text, validate=True)
        decryptor = Cipher(AES(key), CBC(key[:16])).decryptor()
        plain = decryptor.update(sealed) + decryptor.finalize()
    except ValueError as error:
        raise CallbackRefused from error
    padding = plain[-1] if plain else 0
    if not 1 <= padding <= PADDING or len(plain) < HEAD + 4 + padding:
        raise CallbackRefused
    plain = plain[HEAD:-padding]
    length = int.from_bytes(plain[:4], "big")
    content, found = plain[4 : 4 + length], plain[4 + length :]
    if len(content) < length or found != receiver.encode():
        raise CallbackRefused
    return content


def parse_xml_document(content: bytes) -> Element:
    """Return the root of an XML document without a document type, which could expand without bound.

    Raises:
        ValueError: it is something else.
    """
    text = content.decode()
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("a document type is not accepted")
    try:
        return fromstring(text)  # noqa: S314  without a document type nothing expands
    except ParseError as error:
        raise ValueError(str(error)) from None


LONGEST_AGE = timedelta(minutes=10)
SHORTEST_SMS_TOKEN = 16  # characters; the address is the only proof
MOST_REPORTS = 5_000
CHINA = ZoneInfo("Asia/Shanghai")
SUCCESS = "success"


@dataclass(frozen=True, slots=True)
class CallbackRequest:
    query: Mapping[str, str]
    body: bytes | None  #: None for the verification of the address
    path_token: str  #: what follows the channel in the path
    now: datetime


@dataclass(frozen=True, slots=True)
class Report:
    """A receipt as reported. It names its message by the delivery key, or by channel and the vendor's id."""

    kind: str  #: of `ReceiptKind`
    at: datetime | None = None  #: None: now
    delivery_key: UUID | None = None
    channel: str = ""
    vendor_id: str = ""
    detail: str = ""
    permanent: bool = False  #: a bounce after which nothing more is sent to the address
    address: str = ""  #: the address that bounced; "": the customer's present one
    opens_conversation: bool = True  #: a reply that is not yet stored as a conversation


@dataclass(frozen=True, slots=True)
class CustomerMessage:
    """A message that a customer sent. Its text is not kept."""

    address: str
    message_id: str
    at: datetime


@dataclass(slots=True)
class CallbackResult:
    text: str = SUCCESS
    content_type: str = "text/plain"
    reports: list[Report] = field(default_factory=list)
    messages: list[CustomerMessage] = field(default_factory=list)
    sync_token: str = ""  #: WeChat customer service: messages wait at the vendor and are fetched with it


class WeChatCallbacks:
    """Callbacks of WeCom and WeChat: `callback_token`, and `callback_key` where messages are encrypted."""

    settings: dict[str, str]
    receiver_field: ClassVar[str]  #: setting with the id that callbacks are encrypted for
    accepts_plain: ClassVar[bool] = False  #: without `callback_key` the vendor may send plain messages

    def check_callback_settings(self) -> None:
        """Raise `ValueError` for settings of callbacks that the vendor would not accept."""
        token, key = self.settings["callback_token"], self.settings["callback_key"]
        if token and not (3 <= len(token) <= 32 and token.isascii() and token.isalnum()):
            raise InvalidSetting("callback_token", _("must have 3 to 32 letters and digits"))
        if key:
            try:
                read_key(key)
            except ValueError as error:
                raise InvalidSetting("callback_key", str(error)) from None
        if key and not token:
            raise InvalidSetting("callback_token", _("is missing"))
        if token and not key and not self.accepts_plain:
            raise InvalidSetting("callback_key", _("is missing"))

    def answer_callback(self, request: CallbackRequest) -> CallbackResult:
        """Return what a genuine call reports. Raises `CallbackRefused`, and `ValueError` for unreadable content."""
        if not self.settings["callback_token"] or request.path_token:
            raise CallbackRefused
        given = request.query.get("timestamp", "")
        if not (given.isascii() and given.isdecimal() and len(given) <= 10):
            raise CallbackRefused
        if abs(request.now - datetime.fromtimestamp(int(given), UTC)) > LONGEST_AGE:
            raise CallbackRefused
        if request.body is None:
            return CallbackResult(text=self._open_echo(request.query))
        result = CallbackResult()
        self.read_message(self._open(request.query, request.body), request.now, result)
        return result

    def _open_echo(self, query: Mapping[str, str]) -> str:
        echo = query.get("echostr", "")
        if query.get("msg_signature"):
            return self._decrypt(query, echo).decode()
        self._check_plain(query)
        if not echo.isascii() or not echo.isalnum() or len(echo) > 128:
            raise CallbackRefused
        return echo

    def _open(self, query: Mapping[str, str], body: bytes) -> Element:
        if not self.settings["callback_key"]:
            self._check_plain(query)
            return parse_xml_document(body)
        try:
            sealed = parse_xml_document(body).findtext("Encrypt") or ""
        except ValueError as error:
            raise CallbackRefused from error
        return parse_xml_document(self._decrypt(query, sealed.strip()))

    def _decrypt(self, query: Mapping[str, str], sealed: str) -> bytes:
        if not self.settings["callback_key"] or not sealed:
            raise CallbackRefused
        parts = (self.settings["callback_token"], query.get("timestamp", ""), query.get("nonce", ""), sealed)
        check_signature(query.get("msg_signature", ""), *parts)
        return decrypt(sealed, read_key(self.settings["callback_key"]), self.settings[self.receiver_field])

    def _check_plain(self, query: Mapping[str, str]) -> None:
        # The plain signature covers no content. With a key only encrypted messages count.
        if not self.accepts_plain:
            raise CallbackRefused
        parts = (self.settings["callback_token"], query.get("timestamp", ""), query.get("nonce", ""))
        check_signature(query.get("signature", ""), *parts)

    def read_message(self, root: Element, now: datetime, result: CallbackResult) -> None:
        """Add what a message reports to the result. A message other than an event is one of the customer's."""
        kind = root.findtext("MsgType") or ""
        at = read_seconds(root.findtext("CreateTime"), now)
        if kind and kind != "event":
            address = (root.findtext("FromUserName") or "").strip()
            message_id = (root.findtext("MsgId") or "").strip() or f"{address}:{root.findtext('CreateTime')}"
            if address and len(message_id) <= 200:
                result.messages.append(CustomerMessage(address, message_id, at))
        elif kind:
            self.read_event(root, at, result)

    def read_event(self, root: Element, at: datetime, result: CallbackResult) -> None:
        """Add what an event reports to the result."""


def read_send_job(root: Element, at: datetime, result: CallbackResult) -> None:
    """Add the receipt of a template or subscription message of an official account."""
    event = root.findtext("Event")
    if event == "TEMPLATESENDJOBFINISH":
        status = (root.findtext("Status") or "").strip()
        _add_send_job(result, root.findtext("MsgID"), at, status == SUCCESS, status, "user block" in status)
    elif event == "subscribe_msg_sent_event":
        for each in root.iterfind(".//SubscribeMsgSentEvent/List"):
            sent = each.findtext("ErrorCode") == "0"
            _add_send_job(result, each.findtext("MsgID"), at, sent, each.findtext("ErrorStatus") or "", False)


def _add_send_job(
    result: CallbackResult, message_id: str | None, at: datetime, sent: bool, status: str, permanent: bool
) -> None:
    if message_id and len(result.reports) < MOST_REPORTS:
        kind = "delivered" if sent else "bounced"
        detail = "" if sent else status[:300]
        report = Report(kind, at, vendor_id=message_id[:120], detail=detail, permanent=permanent and not sent)
        result.reports.append(report)


class SmsCallbacks:
    """Reports of SMS vendors. They carry no signature: `callback_token` at the end of the address is the proof."""

    settings: dict[str, str]
    accepted_answer: ClassVar[Mapping[str, Any]]

    def check_callback_settings(self) -> None:
        """Raise `ValueError` for a token that can be guessed."""
        token = self.settings["callback_token"]
        if token and not (SHORTEST_SMS_TOKEN <= len(token) <= 128 and token.isascii() and token.isalnum()):
            raise InvalidSetting(
                "callback_token",
                _("must have %(least)s to 128 letters and digits", least=SHORTEST_SMS_TOKEN),
            )

    def answer_callback(self, request: CallbackRequest) -> CallbackResult:
        """Return the receipts of a call. Raises `CallbackRefused`, and `ValueError` for unreadable content."""
        token = self.settings["callback_token"]
        if not token or not constant_time_compare(request.path_token, token):
            raise CallbackRefused
        result = CallbackResult(json.dumps(self.accepted_answer, ensure_ascii=False), "application/json")
        if request.body is None:
            return result
        try:
            given = json.loads(request.body)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(given, list):
            raise ValueError("must be a list of reports")
        for each in given[:MOST_REPORTS]:
            if isinstance(each, Mapping) and (report := self.read_report(each, request.now)):
                result.reports.append(report)
        return result

    def read_report(self, given: Mapping[str, Any], now: datetime) -> Report | None:
        """Return one report, or None for one that names no message."""
        raise NotImplementedError


def build_sms_report(
    delivered: bool, at: datetime, delivery_key: object, vendor_id: object, code: object, meaning: object
) -> Report | None:
    """Return the receipt of one SMS. A number that does not exist (空号) bounces for good."""
    key = read_uuid(delivery_key)
    name = vendor_id if isinstance(vendor_id, str) and vendor_id.isprintable() else ""
    if key is None and not 0 < len(name) <= 120:
        return None
    detail = "" if delivered else f"{_clean(code)} {_clean(meaning)}".strip()[:300]
    return Report(
        "delivered" if delivered else "bounced", at, key, vendor_id="" if key else name, detail=detail,
        permanent=not delivered and "空号" in detail,
    )  # fmt: skip


def read_uuid(value: object) -> UUID | None:
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None


def read_seconds(text: str | None, now: datetime) -> datetime:
    """Return the instant of seconds since 1970; `now` for anything else, and for the future."""
    try:
        return min(datetime.fromtimestamp(int(text or ""), UTC), now)
    except (ValueError, OverflowError, OSError):
        return now


def read_china_time(text: object, now: datetime) -> datetime:
    """Return the instant of a time in China; `now` for anything else, and for the future."""
    try:
        return min(datetime.strptime(str(text), "%Y-%m-%d %H:%M:%S").replace(tzinfo=CHINA), now)
    except (ValueError, OverflowError):
        return now


def _clean(text: object) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in str(text or "")[:300])
