"""Define the values that pass from judging to the sender and from the sender to settling."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from scheduling.channels.base import Channel, Message, Outcome
from scheduling.channels.quota import HeldSlot
from scheduling.delivery.presence import PresenceQuestion
from scheduling.ledger.touches import Sending
from scheduling.ledger.transitions import Claim
from scheduling.policy.guards import GuardVerdict
from scheduling.policy.specs import ChannelSpec

LEASE = timedelta(seconds=45)
BATCH_DEADLINE = timedelta(seconds=20)  #: after the claim; a delivery that has not started by then is released


@dataclass(slots=True)
class Delivery:
    """A touch with all data needed to send and settle it."""

    claim: Claim
    message: Message  #: as the attempt stores it
    outgoing: Message  #: as the receiver gets it: links may be redirects
    channel: Channel
    spec: ChannelSpec
    attempt: int  #: number of the next attempt
    claimed_at: datetime  #: by PostgreSQL's clock
    expires_at: datetime
    clock: float  #: monotonic clock of this process at `claimed_at`
    node_id: int
    priority: int
    event_at: datetime | None  #: a conversation that started later blocks it; None: the node ignores conversations
    question: PresenceQuestion | None = None  #: the presence question right before sending
    with_unknown_outcome: bool = False  #: an earlier attempt has an unknown outcome
    late: float = 0.0  #: seconds past due at `claimed_at`
    receiver: str = ""  #: key of its lane; empty: not known before it is submitted
    granted: bool = False  #: it has a grant of the vendor's quota
    slot: HeldSlot | None = None  #: of that grant
    started_at: float = 0.0  #: monotonic time at which it left the queue of its lane
    sent_at: float = 0.0
    ended_at: float = 0.0

    @property
    def asks_redis(self) -> bool:
        return self.question is not None or bool(self.channel.quotas)

    @property
    def sending(self) -> Sending:
        return Sending(self.claim, self.node_id, self.spec.id, self.message.category == "marketing", self.event_at)

    def instant(self, monotonic: float) -> datetime:
        """Convert a monotonic time to PostgreSQL's time. The node's wall clock has no effect."""
        return self.claimed_at + timedelta(seconds=monotonic - self.clock)

    def expires_in(self, monotonic: float) -> timedelta:
        return self.expires_at - self.instant(monotonic)

    def left(self, monotonic: float) -> float:
        """Return the seconds until the batch deadline."""
        return self.clock + BATCH_DEADLINE.total_seconds() - monotonic


@dataclass(frozen=True, slots=True)
class Deferred:
    """Not tried: the quota is used up, the lane is full, or the receiver does not answer."""

    reason: str
    delay: timedelta


#: Not tried: deferred, or a change after the verdict forbids it.
Untried = (Deferred, GuardVerdict)
SendResult = Outcome | Deferred | GuardVerdict
DeliveryResult = tuple[Delivery, SendResult]
