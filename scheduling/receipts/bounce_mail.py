"""Read mail about sent mail: delivery status notifications (RFC 3464) and complaints (RFC 5965).

The sent mail is known by its `Message-ID`, which contains the delivery key. An outsider does not know the key. Its
receiver does, but such a mail can disable only the address that it names, and only if it is the customer's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from email import message_from_bytes, policy
from email.errors import MessageError
from email.message import EmailMessage, Message
from typing import Any
from uuid import UUID

from scheduling.receipts.recording import DETAIL, RecordingResult, Report, record_reports

LARGEST_MAIL = 1_048_576  #: bytes; the rest of a larger one is not read
MOST_PARTS = 50
#: The mailbox or its domain does not exist, or is closed. Other refusals, such as a full mailbox, may pass.
GONE = re.compile(r"5\.(1\.(1|2|3|6|10)|2\.1)\b")
MESSAGE_ID = re.compile(r"<([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})@", re.IGNORECASE)
HEADERS = re.compile(rb"^message-id:\s*(<[^>\r\n]{1,300}>)", re.IGNORECASE | re.MULTILINE)
KINDS = {"failed": "bounced", "delivered": "delivered"}


def record_bounce(content: bytes) -> RecordingResult:
    """Record what a mail reports. Idempotent.

    Raises:
        ValueError: it reports nothing about a mail of Aftertouch.
        django.db.Error: PostgreSQL is unavailable.
    """
    return record_reports([read_bounce(content)])


def read_bounce(content: bytes) -> Report:
    """Return the receipt of a mail. Raises `ValueError` if it reports nothing about a mail of Aftertouch."""
    content = content[:LARGEST_MAIL]
    try:
        mail = message_from_bytes(content, policy=policy.default.clone(raise_on_defect=False))
        parts = [part for _, part in zip(range(MOST_PARTS), mail.walk(), strict=False)]
        report, key = _read_report(parts), _find_delivery_key(mail, parts, content)
    except (MessageError, LookupError, AttributeError, ValueError, RecursionError, TypeError) as error:
        raise ValueError("the mail cannot be read") from error
    if report is None:
        raise ValueError("the mail is no report about a delivery")
    if key is None:
        raise ValueError("the mail names no message of Aftertouch")
    return Report(delivery_key=key, **report)


def _read_report(parts: Sequence[Message]) -> dict[str, Any] | None:
    for part in parts:
        kind = part.get_content_type()
        if kind == "message/feedback-report":
            return {"kind": "complained", "detail": "feedback-report"}
        if kind == "message/delivery-status":
            for block in part.get_payload() if part.is_multipart() else ():
                if isinstance(block, Message) and (found := _read_recipient(block)):
                    return found
    return None


def _read_recipient(block: Message) -> dict[str, Any] | None:
    """Return the receipt of one recipient, or None for a block about the whole mail and for a delay."""
    kind = KINDS.get(_read_mail_header(block, "Action").lower())
    if kind is None:
        return None
    status = _read_mail_header(block, "Status")
    text = _read_mail_header(block, "Diagnostic-Code").partition(";")[2]
    detail = " ".join(f"{status} {text}".split())[:DETAIL]
    if kind == "delivered":
        return {"kind": kind, "detail": detail}
    address = _read_mail_header(block, "Original-Recipient") or _read_mail_header(block, "Final-Recipient")
    address = address.rpartition(";")[2].strip()[:254]
    return {"kind": kind, "detail": detail, "address": address, "permanent": bool(GONE.match(status) and address)}


def _read_mail_header(block: Message, name: str) -> str:
    text = str(block.get(name, ""))
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()


def _find_delivery_key(mail: EmailMessage | Message, parts: Sequence[Message], content: bytes) -> UUID | None:
    """Return the key of the returned mail: of its part, or of its headers in the text of the report."""
    for part in parts:
        if part is not mail and part.get("Message-ID") and (found := MESSAGE_ID.match(str(part["Message-ID"]).strip())):
            return UUID(found[1])
    own = str(mail.get("Message-ID", "")).strip()
    for name in HEADERS.findall(content):
        text = name.decode("ascii", "replace")
        if text != own and (found := MESSAGE_ID.match(text)):
            return UUID(found[1])
    return None
