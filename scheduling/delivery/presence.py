"""Ask the providers of other apps, before a touch is sent, whether a live conversation blocks it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar, NamedTuple, Protocol

import structlog

from scheduling.app_integrations import integrations

log = structlog.get_logger(__name__)


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
