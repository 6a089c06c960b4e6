"""Check live sessions right before a touch is sent (`Integration.presence`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar

from django.conf import settings

from scheduling.delivery.presence import PresenceQuestion
from sessions.detection.expired_keys import find_returned_keys
from sessions.store.client import StoreUnavailable
from sessions.store.sessions import Store, live_store

SILENT = "session.silent"  #: the customer is silent
UNANSWERED = "session.unanswered"  #: the customer wrote, and no agent answers
UNKNOWN = "presence_unknown"


class SessionPresence:
    """Presence blocks from the live sessions. Raises `StoreUnavailable`: then presence is unknown for every touch.

    While a node of a cluster is unavailable, presence is unknown only for its sessions and users.
    """

    event_types: ClassVar[frozenset[str]] = frozenset({SILENT, UNANSWERED})

    def __init__(self, store: Store | None = None) -> None:
        self._store = store

    @property
    def store(self) -> Store:
        return self._store or live_store()

    def presence_blocks(self, questions: Sequence[PresenceQuestion]) -> list[str]:
        answers = [""] * len(questions)
        silences = [number for number, each in enumerate(questions) if each.event_type in self.event_types]
        others = [number for number, each in enumerate(questions) if each.event_type not in self.event_types]
        for numbers, ask in ((silences, self._about_silences), (others, self._about_others)):
            if numbers:
                for number, answer in zip(numbers, ask([questions[each] for each in numbers]), strict=True):
                    answers[number] = answer
        return answers

    def note_sending(self, questions: Sequence[PresenceQuestion], sent: Sequence[bool]) -> None:
        asked = [number for number, each in enumerate(questions) if each.event_type == SILENT]
        silences = [parse_event_id(questions[number].event_id) for number in asked]
        self.store.note_sending(silences, [sent[number] for number in asked])

    def _about_silences(self, questions: Sequence[PresenceQuestion]) -> list[str]:
        now, stand = self.store.still_silent(
            [parse_event_id(each.event_id) for each in questions],
            # A message about a missing answer is no guide message, so nothing is reserved for it.
            send_until=[
                _latest_send_time(each) if each.about_to_send and each.event_type == SILENT else None
                for each in questions
            ],
        )
        returned: set[str] | None
        try:
            returned = find_returned_keys([each for each in stand if isinstance(each, str)])
        except StoreUnavailable:  # the other silences do not depend on the gateway's server
            returned = None
        reasons = []
        for question, holds in zip(questions, stand, strict=True):
            if isinstance(holds, str):
                holds = None if returned is None else holds not in returned
            reasons.append(_block_reason(question, holds, now))
        return reasons

    def _about_others(self, questions: Sequence[PresenceQuestion]) -> list[str]:
        heard_at = self.store.last_frames([each.user_id for each in questions])
        return [
            UNKNOWN if isinstance(at, str) else "conversation" if at and at > question.event_at else ""
            for question, at in zip(questions, heard_at, strict=True)
        ]


def _block_reason(question: PresenceQuestion, is_current: bool | None, now: datetime) -> str:
    if is_current is None:
        return UNKNOWN
    if not is_current:
        return "answered"
    # A customer without an answer waits however late it is.
    return "stale" if question.event_type == SILENT and now > _latest_send_time(question) else ""


def _latest_send_time(question: PresenceQuestion) -> datetime:
    """Return the latest useful send time of a guide message, counted from the time its node planned."""
    return (question.planned_at or question.event_at) + settings.AFTERTOUCH_SILENCE_STALE


def parse_event_id(event_id: str) -> tuple[str, int]:
    """Return the session id and the arming of an event id. A foreign id has no arming; its silence always holds."""
    session_id, _, armed_at = event_id.rpartition(":")
    return (session_id, int(armed_at)) if armed_at.isascii() and armed_at.isdigit() else (event_id, 0)
