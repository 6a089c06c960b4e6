"""What a channel is: one way out of the house, and the four things that can come back.

A channel is a class with one coroutine. It never raises for what the receiver does; it answers with an outcome, and
the outcome alone decides what the ledger does next. It may raise for a bug of its own, which counts as `Unknown`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Protocol, runtime_checkable
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Message:
    """One rendered touch on its way out. Everything a channel may know about it."""

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
    event: Mapping[str, Any]  #: {"source", "id", "type", "time"}
    repeatable: bool = True  #: the channel row says that a repeat with the same key has no second effect
    target: Mapping[str, Any] = field(default_factory=dict)  #: where to: {"url", "secret"} of a robot, {"address"} …
    trace_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver has it."""

    reply: str = ""  #: at most 1,000 characters of what it said
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Transient:
    """The receiver certainly does not have it, and a later attempt may succeed."""

    reason: str  #: a short code from a bounded set: "connect", "throttled", "http_503", "vendor_45009" …
    detail: str = ""
    retry_after: timedelta | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Permanent:
    """The receiver certainly does not have it, and asking again will not help."""

    reason: str
    detail: str = ""
    status: int | None = None
    disable_target: bool = False  #: the target said it is gone (HTTP 410): nothing more is sent there


@dataclass(frozen=True, slots=True)
class Unknown:
    """The request went out and no answer came back: it may have had its effect."""

    reason: str
    detail: str = ""


Outcome = Delivered | Transient | Permanent | Unknown


@dataclass(frozen=True, slots=True)
class Quota:
    """At most `limit` messages to one target in any `window`, counted over all workers."""

    limit: int
    window: timedelta


class Channel(Protocol):
    """One configured channel. Built once a configuration version and process, used from one event loop."""

    kind: ClassVar[str]
    needs_target: ClassVar[bool]  #: True: without a target for the community or an address the touch fails, `no_target`
    address_key: ClassVar[str]  #: the key in a customer's `addresses`, or "" where targets belong to communities
    quotas: ClassVar[tuple[Quota, ...]]  #: for each target
    secret_fields: ClassVar[frozenset[str]]  #: names in `config` and targets that are stored encrypted and never shown
    default_idempotent: ClassVar[bool]  #: whether a repeat with the same key has no second effect

    def __init__(self, config: Mapping[str, Any], timeout: timedelta) -> None:
        """Take the settings of one channel row. Raises `ValueError("field: what is wrong")`."""

    @classmethod
    def validate_target(cls, target: Mapping[str, Any]) -> None:
        """Raises `ValueError("field: what is wrong")` where a target of this kind cannot work."""

    def target_key(self, message: Message) -> str:
        """What limits in flight, quotas and the dead-endpoint breaker are counted by: the receiver, not the message.
        Quotas are counted over all channels of the kind."""

    async def send(self, message: Message, deadline: datetime) -> Outcome:
        """Try once. Ends by `deadline` or `timeout`, whichever is sooner, whatever the receiver does."""


@runtime_checkable
class NarrowChannel(Protocol):
    """A channel that serves only so many at once, because each takes a thread. What is over waits in its lane, where
    it is not marked as sent yet and no time of its attempt runs."""

    at_once: ClassVar[int]


@runtime_checkable
class ImmediateChannel(Protocol):
    """A channel that calls nobody: the attempt's row is the delivery, written by the transaction that decided it."""

    def send_now(self, message: Message) -> Delivered:
        """Tell of it, after the commit."""


def is_immediate(channel: object) -> bool:
    """Whether this channel, or its class, is an `ImmediateChannel`: an isinstance of a protocol costs 20 times as
    much."""
    return hasattr(channel, "send_now")


class Failure(Exception):
    """A request without an answer. `reason` is a code from a bounded set; `detail` never holds a URL or a secret."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def outcome(self) -> Outcome:
        raise NotImplementedError


class Refused(Failure):
    """Never left this machine and never will: the URL is unusable or leads to an address that is not public."""

    def outcome(self) -> Permanent:
        return Permanent(self.reason, self.detail)


class NotSent(Failure):
    """No byte of the request was written: no name, no connection, no TLS, or no time left."""

    def outcome(self) -> Transient:
        return Transient(self.reason, self.detail)


class NoAnswer(Failure):
    """The request was (or may have been) written, then came silence, a reset or something that is not HTTP."""

    def outcome(self) -> Unknown:
        return Unknown(self.reason, self.detail)
