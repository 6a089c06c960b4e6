"""Define the values that pass from judging to the sender and from the sender to settling.

A quota slot counts from its grant. A slow name server, connection or TLS handshake delays the request. Without a
correction its receiver would get more messages in a window than its quota: delayed ones together with those of the next
window. So a held slot is moved to the instant at which its message is sent.

Before a touch is sent, the presence providers of other apps are asked whether a live conversation blocks it.

The links of a text become short signed redirects, by which a click is known. A redirect names the delivery key and the
number of the link. Its target is the link of that number in the stored text, which keeps the original links: no
redirect leads elsewhere. A retry makes the same redirects.
"""

from __future__ import annotations

import asyncio
import re
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol
from uuid import UUID

import structlog
from django.conf import settings
from django.core.signing import BadSignature
from django.utils.crypto import constant_time_compare, salted_hmac

from scheduling.app_integrations import integrations
from scheduling.channels.base import CalendarQuota, Channel, Message, Outcome, Quota
from scheduling.channels.quota import MARGIN, QuotaGate
from scheduling.ledger.touches import Sending
from scheduling.ledger.transitions import Claim
from scheduling.policy.guards import GuardVerdict
from scheduling.policy.specs import ChannelSpec, TemplateSpec

log = structlog.get_logger(__name__)

FRESH = MARGIN.total_seconds() / 2  #: seconds of delay that the margin of each window covers; costs no call of Redis


@dataclass(slots=True)
class HeldSlot:
    """The granted slot of a message that is not sent yet."""

    gate: QuotaGate
    quotas: Sequence[Quota | CalendarQuota]
    target_key: str
    slot: int
    counted_at: float  #: monotonic time, not after the grant

    async def renew(self) -> None:
        """Move a slot that is more than 0.1 s old to now. Wait while its receiver has no place for it.

        The caller has a time limit. A message of a minute's quota never waits, unless its grant is as old.
        """
        if not any(isinstance(each, Quota) for each in self.quotas):
            return
        while (asked_at := time.monotonic()) - self.counted_at > FRESH:
            moved, wait = await asyncio.to_thread(self.gate.move, self.quotas, self.target_key, self.slot)
            if moved:
                self.slot, self.counted_at = moved, asked_at
                return
            await asyncio.sleep(wait.total_seconds())


LEASE = timedelta(seconds=45)
BATCH_DEADLINE = timedelta(seconds=20)  #: after the claim; a delivery that has not started by then is released


@dataclass(slots=True)
class Delivery:
    """A touch with all data needed to send and settle it."""

    claim: Claim
    message: Message
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
    tracks_links: bool = False  #: links of the text become redirects
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

    @property
    def outgoing(self) -> Message:
        """Return the message as the receiver gets it. The attempt stores the original text."""
        return rewrite_links(self.message) if self.tracks_links else self.message

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


@dataclass(frozen=True, slots=True)
class SendRefused:
    """Not tried: a change after the verdict forbids it."""

    verdict: GuardVerdict


Untried = (Deferred, SendRefused)
DeliveryResult = tuple[Delivery, Outcome | Deferred | SendRefused]


# --- presence ---------------------------------------------------------------------------------------------------------


class PresenceQuestion(NamedTuple):
    """A touch about which the providers are asked."""

    user_id: str
    chat_id: str
    event_type: str
    event_id: str
    event_at: datetime
    planned_at: datetime | None = None  #: due time by the node's delay
    about_to_send: bool = False  #: True: without a presence block it is sent right after this question


SendingNote = tuple[PresenceQuestion, bool]  #: whether its touch is sent now


class Presence(Protocol):
    #: Event types of the provider. It is asked about all their touches, even if the node ignores conversations.
    event_types: ClassVar[frozenset[str]]

    def presence_blocks(self, questions: Sequence[PresenceQuestion]) -> Sequence[str]:
        """Return one code for each question.

        - "": no block
        - "conversation": the customer is in a conversation
        - "answered": the silence of this event is over
        - "presence_unknown": unknown; the touch is deferred for 30 s

        An exception counts as "presence_unknown" for all questions. A touch is asked about when it is judged, and again
        right before the sender marks it. Only the last question has `about_to_send`. The ledger may still stop the
        touch then, so a provider counts nothing here.
        """

    def note_sending(self, questions: Sequence[PresenceQuestion], sent: Sequence[bool]) -> None:
        """Count touches of `event_types` that are sent now.

        `sent` is False for a touch that the ledger or a provider stopped after the question.

        Called right before the channel. The call may come twice for a touch, after the message, or not at all: a worker
        can be killed. An exception is logged and stops no touch.
        """


def presence_providers() -> list[Presence]:
    return [provider for app in integrations() for provider in app.presence]


def provider_event_types() -> list[str]:
    """Return the event types for whose touches the providers are always asked."""
    return sorted({each for provider in presence_providers() for each in provider.event_types})


def presence_blocks(questions: Sequence[PresenceQuestion]) -> list[str]:
    """Return the first presence block of any provider, for each question."""
    answers = [""] * len(questions)
    if not questions:
        return answers
    for provider in presence_providers():
        try:
            found = provider.presence_blocks(questions)
        except Exception:
            log.warning("presence_unknown", questions=len(questions), exc_info=True)
            found = ["presence_unknown"] * len(questions)
        answers = [mine or theirs for mine, theirs in zip(answers, found, strict=True)]
    return answers


def note_sending(notes: Sequence[SendingNote]) -> None:
    """Report to each provider which touches of its event types are sent now. Never raises."""
    for provider in presence_providers():
        own = [note for note in notes if note[0].event_type in provider.event_types]
        if not own:
            continue
        try:
            provider.note_sending([question for question, _ in own], [sent for _, sent in own])
        except Exception:
            log.warning("sending_not_recorded", questions=len(own), exc_info=True)


# --- links ------------------------------------------------------------------------------------------------------------


SALT = "scheduling.links"
MOST_LINKS = 200  #: of one text; further ones stay as they are
SIGNATURE = 10  # bytes
TOKEN = re.compile(r"[A-Za-z0-9_-]{36}")  #: 27 bytes: delivery key, number, signature
#: ASCII only. A letter of another script right after it may belong to the address, so the link then stays. After it may
#: come ASCII, or general, Chinese and full-width punctuation.
LINK = re.compile(
    r"https?://(?=[a-z0-9])[a-z0-9\-._~:/?#@!$&*+,;=%()]++(?![^\x00-\x7f\u2000-\u206f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20])",
    re.IGNORECASE | re.ASCII,
)
ENDS = ".,;:!?*_~"  #: punctuation of the sentence or of Markdown


def tracks_links(template: TemplateSpec, channel: Channel) -> bool:
    """Return whether links of this template are rewritten for this channel. A robot speaks to a group, not a person."""
    if not settings.AFTERTOUCH_LINK_BASE_URL:
        return False
    return template.tracks_links and bool(channel.address_key or not channel.needs_target)


def rewrite_links(message: Message) -> Message:
    """Return the message with redirects instead of links."""
    if "://" not in message.body:
        return message
    base = settings.AFTERTOUCH_LINK_BASE_URL.rstrip("/")
    own = (f"{base}/l/", f"{settings.AFTERTOUCH_BASE_URL.rstrip('/')}/u/")

    def redirect(number: int, target: str) -> str:
        if number >= MOST_LINKS or target.startswith(own):
            return target
        return f"{base}/l/{make_link_token(message.delivery_key, number)}"

    return message._replace(body=_replace_links(message.body, redirect))


def find_link(text: str, number: int) -> str:
    """Return the link of this number in a text, or ""."""
    found: list[str] = []

    def note(_: int, target: str) -> str:
        found.append(target)
        return target

    _replace_links(text, note)
    return found[number] if number < len(found) else ""


def _replace_links(text: str, replace: Callable[[int, str], str]) -> str:
    count = -1

    def act(match: re.Match[str]) -> str:
        nonlocal count
        # Without the end of the sentence, or of the Markdown link around it.
        link, depth = match[0], 0
        for place, letter in enumerate(link):
            depth += (letter == "(") - (letter == ")")
            if depth < 0:
                link = link[:place]
                break
        target = link.rstrip(ENDS)
        count += 1
        return replace(count, target) + match[0][len(target) :]

    return LINK.sub(act, text)


# --- tokens -----------------------------------------------------------------------------------------------------------


def make_link_token(delivery_key: UUID, number: int) -> str:
    content = delivery_key.bytes + bytes([number])
    return urlsafe_b64encode(content + _sign(content, settings.SECRET_KEY)).decode()


def read_link_token(token: str) -> tuple[UUID, int]:
    """Return the delivery key and the number of the link.

    Raises:
        BadSignature: `make_link_token` did not make it, or its key is gone.
    """
    if not TOKEN.fullmatch(token):
        raise BadSignature("not a token")
    raw = urlsafe_b64decode(token)
    content, signature = raw[:-SIGNATURE], raw[-SIGNATURE:]
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    if not any(constant_time_compare(signature, _sign(content, key)) for key in keys):
        raise BadSignature("not a token")
    return UUID(bytes=content[:16]), content[16]


@lru_cache(maxsize=4)
def _derive_key(secret: str | bytes) -> bytes:
    return salted_hmac(SALT, "", secret=secret, algorithm="sha256").digest()


def _sign(content: bytes, secret: str | bytes) -> bytes:
    return salted_hmac(SALT, content, secret=_derive_key(secret), algorithm="sha256").digest()[:SIGNATURE]
