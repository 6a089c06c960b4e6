"""Define the interface of a channel, its four outcomes and what its vendor reports; load the kinds of the settings.

A channel is a class with one coroutine. It never raises for the receiver's behaviour: it returns an outcome, and the
outcome alone decides the next step of the ledger. An exception from a defect of the channel counts as `Unknown`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, ClassVar, NamedTuple
from uuid import UUID

import structlog
from django.conf import settings
from django.utils.module_loading import import_string

from scheduling.channels.markup import BadContent
from scheduling.errors import FieldError, InvalidInput

log = structlog.get_logger(__name__)


class Message(NamedTuple):
    """One rendered touch with all data that a channel may use."""

    task_id: UUID
    delivery_key: UUID  #: constant over retries and re-publications: the idempotency key for the receiver
    user_id: str
    chat_id: str
    node: str
    content_type: str
    category: str  #: "marketing" or "service"
    subject: str
    body: str
    locale: str
    event: Mapping[str, Any]  #: {"source", "id", "type", "time"}; the time is a datetime
    repeatable: bool = True  #: channel setting: a repeat with the same key has no second effect
    target: Mapping[str, Any] = {}  #: {"url", "secret"} of a robot, {"address"} …
    trace_id: UUID | None = None
    spoke_at: datetime | None = None  #: start of the customer's last known conversation


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver accepted the message."""

    reply: str = ""  #: at most 1,000 characters of the response
    status: int | None = None
    vendor_id: str = ""  #: the vendor's id of the message, if its receipts name that


@dataclass(frozen=True, slots=True)
class Transient:
    """The receiver certainly does not have the message. A later attempt may succeed."""

    reason: str  #: a short code from a bounded set: "connect", "throttled", "http_503", "vendor_45009" …
    detail: str = ""
    retry_after: timedelta | None = None
    status: int | None = None
    asked: bool = True  #: False: this process had no free connection to the host, which is no attempt


@dataclass(frozen=True, slots=True)
class Permanent:
    """The receiver certainly does not have the message. A retry cannot succeed."""

    reason: str
    detail: str = ""
    status: int | None = None
    disable_target: bool = False  #: the receiver answered that it is gone (HTTP 410): send nothing more there


@dataclass(frozen=True, slots=True)
class Unknown:
    """The request was sent without a clear answer. It may have had its effect."""

    reason: str
    detail: str = ""


Outcome = Delivered | Transient | Permanent | Unknown


@dataclass(frozen=True, slots=True)
class Quota:
    """At most `limit` messages to one target in any `window`, over all workers."""

    limit: int
    window: timedelta


@dataclass(frozen=True, slots=True)
class CalendarQuota:
    """At most `limit` messages to one target in a "day" or "month" of the server's time zone, over all workers."""

    limit: int
    period: str


Quotas = tuple[Quota | CalendarQuota, ...]


# --- callbacks of vendors ---------------------------------------------------------------------------------------------


# Vendors call us with receipts of messages, and with messages of customers. Both have ids, so a repeated call has no
# second effect.

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
    at: datetime | None = None  #: None: the vendor names no time; now
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


def limit_instant(at: datetime, now: datetime) -> datetime | None:
    """Return an instant that a vendor reports, at most `now`; None for its zero and for one of the far future."""
    return min(at, now) if EPOCH < at < now + timedelta(hours=1) else None


def read_uuid(value: object) -> UUID | None:
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None


# --- channels ---------------------------------------------------------------------------------------------------------


class InvalidSetting(InvalidInput, ValueError):
    """A field of a channel's settings or of a target is not accepted."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(FieldError(field, message))
        self.field, self.message = field, message


class Channel:
    """One configured channel. Created once per configuration version and process, used from one event loop."""

    kind: ClassVar[str]
    needs_target: bool = False  #: True: a touch without target or address fails with `no_target`
    target_fields: frozenset[str] = frozenset()  #: of a community's target, as its form shows them
    address_key: str = ""  #: key in a customer's `addresses`, or "" if targets belong to communities
    quotas: Quotas = ()  #: per target; an instance also has the limits of its row
    own_quotas: bool = False  #: the settings of a channel may have quotas
    counts_addresses: bool = False  #: each address of the receiver's lane has limits of its own
    secret_fields: frozenset[str] = frozenset()  #: names in `config` and targets, stored encrypted and never shown
    default_idempotent: bool = False  #: whether a repeat with the same key has no second effect
    #: Limit of concurrent sends where each needs a thread. Further deliveries wait in the lane: they are not marked as
    #: sending, and the time of their attempt does not run.
    at_once: int | None = None

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        """Take the settings of one channel row. Raises `InvalidSetting`."""
        self.timeout = timeout

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Check a target of this kind. Raises `InvalidSetting`."""
        raise NotImplementedError

    def target_key(self, message: Message) -> str:
        """Return the key of the receiver, not of the message.

        Limits in flight, quotas and the circuit breaker count by it. Quotas are counted over all channels of the kind.
        """
        raise NotImplementedError

    def quota_key(self, message: Message) -> str:
        """Return the key that the vendor's quotas count by, where it is another one than the receiver's."""
        return self.target_key(message)

    def escape(self, value: str) -> str:
        """Return a value of a customer or an event, so that it adds no markup to a body that prints it."""
        return value

    @classmethod
    def list_secret_hosts(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """Return scheme, host and port of each receiver of the secret that the settings name. They may be wrong."""
        return frozenset()

    def answer_callback(self, request: CallbackRequest) -> CallbackResult:
        """Return what a call of the vendor reports.

        Raises:
            CallbackRefused: it is not from the vendor, or the kind takes no calls.
            ValueError: its content cannot be read.
        """
        raise CallbackRefused

    async def send(self, message: Message) -> Outcome:
        """Try once. A channel that exceeds its time limit or raises counts as `Unknown`: it may have sent it."""
        try:
            # The channel enforces the limit itself. This one covers a channel that does not.
            async with asyncio.timeout(self.timeout.total_seconds() + 1):
                return await self.attempt(message)
        except Failure as failure:
            return failure.outcome()
        except InvalidSetting as error:
            return Permanent("bad_target", str(error))
        except BadContent as error:
            return Permanent("bad_content", str(error))
        except TimeoutError:
            return Unknown("timeout", f"no end after {self.timeout.total_seconds():g} s")
        except Exception as error:
            log.exception("channel_call_failed", kind=self.kind, task_id=str(message.task_id))
            return Unknown("channel_error", f"{type(error).__name__}: {error}"[:500])

    async def attempt(self, message: Message) -> Outcome:
        """Send within `timeout`.

        May raise `Failure`; before it sends also `BadContent`, and `InvalidSetting` of the target.
        """
        raise NotImplementedError


class Failure(Exception):
    """A request without an answer. `reason` is a code from a bounded set; `detail` never contains a URL or a secret."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def outcome(self) -> Outcome:
        return Unknown(self.reason, self.detail)


class DestinationRefused(Failure):
    """Not sent, and a retry cannot help: the URL is unusable or leads to an address that is not public."""

    def outcome(self) -> Permanent:
        return Permanent(self.reason, self.detail)


class NotSent(Failure):
    """No byte of the request was written: no name, no connection, no TLS, or no time left."""

    def outcome(self) -> Transient:
        return Transient(self.reason, self.detail, asked=self.reason != "busy")


class NoAnswer(Failure):
    """The request was or may have been written. Then came a timeout, a reset or a response that is not HTTP."""


@cache
def channel_kinds() -> dict[str, type[Channel]]:
    return {kind: import_string(path) for kind, path in settings.CHANNELS.items()}


def list_secret_names() -> list[str]:
    """Return the names that are secret in any kind."""
    return sorted({name for kind in channel_kinds().values() for name in kind.secret_fields})


def redirects_secret(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether the settings `after` send the secret to a host that did not get it with `before`."""
    found = channel_kinds().get(kind)
    return found is not None and not found.list_secret_hosts(after) <= found.list_secret_hosts(before)


@cache
def thread_pool(name: str, most: int) -> ThreadPoolExecutor:
    """Return the thread pool of this name in this process. It is created on first use."""
    return ThreadPoolExecutor(most, thread_name_prefix=name)


os.register_at_fork(after_in_child=thread_pool.cache_clear)  # a pool does not survive a fork
