"""Check live sessions right before a touch is sent (`settings.PRESENCE`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar

from django.conf import settings

from scheduling.delivery.presence import PresenceQuestion
from sessions.detection.expired_keys import find_returned_keys
from sessions.store.client import StoreUnavailable
from sessions.store.sessions import Store, live_store

SILENT = "session.silent"


class SessionPresence:
    """Presence blocks from the live sessions. Raises `StoreUnavailable`: then presence is unknown for every touch."""

    event_types: ClassVar[frozenset[str]] = frozenset({SILENT})

    def __init__(self, store: Store | None = None) -> None:
        self._store = store

    @property
    def store(self) -> Store:
        return self._store or live_store()

    def presence_blocks(self, questions: Sequence[PresenceQuestion]) -> list[str]:
        answers = [""] * len(questions)
        silences = [number for number, each in enumerate(questions) if each.event_type == SILENT]
        others = [number for number, each in enumerate(questions) if each.event_type != SILENT]
        for number, answer in zip(silences, self._about_silences([questions[each] for each in silences]), strict=True):
            answers[number] = answer
        for number, answer in zip(others, self._about_others([questions[each] for each in others]), strict=True):
            answers[number] = answer
        return answers

    def note_sending(self, questions: Sequence[PresenceQuestion], sent: Sequence[bool]) -> None:
        asked = [number for number, each in enumerate(questions) if each.event_type == SILENT]
        silences = [parse_event_id(questions[number].event_id) for number in asked]
        self.store.note_sending(silences, [sent[number] for number in asked])

    def _about_silences(self, questions: Sequence[PresenceQuestion]) -> list[str]:
        if not questions:
            return []
        now, stand = self.store.still_silent(
            [parse_event_id(each.event_id) for each in questions],
            send_until=[_latest_send_time(each) if each.about_to_send else None for each in questions],
        )
        try:
            present = find_returned_keys([each for each in stand if isinstance(each, str)])
        except StoreUnavailable:  # the other silences do not depend on the gateway's server
            return [
                "presence_unknown" if isinstance(is_current, str) else _block_reason(question, is_current, now)
                for question, is_current in zip(questions, stand, strict=True)
            ]
        return [
            _block_reason(question, bool(is_current) and is_current not in present, now)
            for question, is_current in zip(questions, stand, strict=True)
        ]

    def _about_others(self, questions: Sequence[PresenceQuestion]) -> list[str]:
        if not questions:
            return []
        heard_at = self.store.last_frames([each.user_id for each in questions])
        return [
            "conversation" if last_frame_at and last_frame_at > question.event_at else ""
            for question, last_frame_at in zip(questions, heard_at, strict=True)
        ]


def _block_reason(question: PresenceQuestion, is_current: bool, now: datetime) -> str:
    return _stale_reason(question, now) if is_current else "answered"


def _stale_reason(question: PresenceQuestion, now: datetime) -> str:
    return "stale" if now > _latest_send_time(question) else ""


def _latest_send_time(question: PresenceQuestion) -> datetime:
    """Return the latest useful send time of a guide message, counted from the time its node planned."""
    return (question.planned_at or question.event_at) + settings.AFTERTOUCH_SILENCE_STALE


def parse_event_id(event_id: str) -> tuple[str, int]:
    """Return the session id and the arming of an event id. A foreign id has no arming; its silence always holds."""
    session_id, _, armed_at = event_id.rpartition(":")
    return (session_id, int(armed_at)) if armed_at.isascii() and armed_at.isdigit() else (event_id, 0)
