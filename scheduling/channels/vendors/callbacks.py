"""The types of what vendors report by calling us: receipts of messages, and messages of customers.

A repeated call has no second effect, because receipts and messages have ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

MOST_REPORTS = 5_000  #: of one call
SUCCESS = "success"


class CallbackRefused(Exception):
    """The request is not from the vendor, or not for this account. The answer gives no reason."""


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
    cursor: str = ""  #: after the fetched messages; "" if none were fetched
    problem: str = ""  #: why messages are left at the vendor, which repeats its call


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def limit_instant(at: datetime, now: datetime) -> datetime:
    """Return an instant that a vendor reports; `now` for one of the future and for one up to 1970, a vendor's zero."""
    return at if EPOCH < at < now else now


def read_uuid(value: object) -> UUID | None:
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None
