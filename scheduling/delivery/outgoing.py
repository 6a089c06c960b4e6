"""Define the values that pass from judging to the sender and from the sender to settling."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from scheduling.channels.base import Channel, Message, Outcome
from scheduling.channels.quota import HeldSlot
from scheduling.delivery.links import rewrite_links
from scheduling.delivery.presence import PresenceQuestion
from scheduling.ledger.touches import Sending
from scheduling.ledger.transitions import Claim
from scheduling.policy.guards import GuardVerdict
from scheduling.policy.specs import ChannelSpec

LEASE = timedelta(seconds=45)
BATCH_DEADLINE = timedelta(seconds=20)  #: after the claim; a delivery that has not started by then is released


class ServerClock(NamedTuple):
    """PostgreSQL's time at a monotonic time of this process. The node's wall clock has no effect."""

    at: datetime
    monotonic: float

    def instant(self, monotonic: float) -> datetime:
        """Convert a monotonic time to PostgreSQL's time."""
        return self.at + timedelta(seconds=monotonic - self.monotonic)


@dataclass(slots=True)
class Delivery:
    """A touch with all data needed to send and settle it."""

    claim: Claim
    message: Message
    channel: Channel
    spec: ChannelSpec
    attempt: int  #: number of the next attempt
    due_at: datetime
    expires_at: datetime
    clock: ServerClock  #: at the claim
    node_id: int
    priority: int
    receiver: str  #: key of its lane
    vendor_key: str  #: key by which the quotas of its channel count
    event_at: datetime | None  #: a conversation that started later blocks it; None: the node ignores conversations
    question: PresenceQuestion | None = None  #: the presence question right before sending
    with_unknown_outcome: bool = False  #: an earlier attempt has an unknown outcome
    tracks_links: bool = False  #: links of the text become redirects
    slot: HeldSlot | None = None  #: its grant of the vendor's quota
    started_at: float = 0.0  #: monotonic time at which it left the queue of its lane
    sent_at: float = 0.0
    ended_at: float = 0.0

    @property
    def asks_redis(self) -> bool:
        return self.question is not None or bool(self.channel.quotas)

    @property
    def sending(self) -> Sending:
        return Sending(self.claim, self.node_id, self.spec.id, self.message.category == "marketing", self.event_at)

    @property
    def outgoing(self) -> Message:
        """Return the message as the receiver gets it. The attempt stores the original text."""
        return rewrite_links(self.message) if self.tracks_links else self.message

    def expires_in(self, monotonic: float) -> timedelta:
        return self.expires_at - self.clock.instant(monotonic)

    def left(self, monotonic: float) -> float:
        """Return the seconds until the batch deadline."""
        return self.clock.monotonic + BATCH_DEADLINE.total_seconds() - monotonic


@dataclass(frozen=True, slots=True)
class Deferred:
    """Not tried: the quota is used up, the lane is full, or the receiver does not answer."""

    reason: str
    delay: timedelta


#: Not tried: deferred, or a change after the verdict forbids it.
Untried = (Deferred, GuardVerdict)
SendResult = Outcome | Deferred | GuardVerdict
DeliveryResult = tuple[Delivery, SendResult]
