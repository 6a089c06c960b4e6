"""What the live sessions have against a touch, asked right before it goes out (`settings.PRESENCE`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from django.conf import settings

from scheduling.presence import Question
from sessions.gateway import is_back
from sessions.store import Store, live

SILENT = "session.silent"


class Live:
    """Raises `StoreAway` where the store does not answer: then nobody knows, and nothing is sent."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store

    @property
    def store(self) -> Store:
        return self._store or live()

    def objections(self, questions: Sequence[Question]) -> list[str]:
        answers = [""] * len(questions)
        silences = [number for number, each in enumerate(questions) if each.event_type == SILENT]
        others = [number for number, each in enumerate(questions) if each.event_type != SILENT]
        for number, answer in zip(silences, self._about_silences([questions[each] for each in silences]), strict=True):
            answers[number] = answer
        for number, answer in zip(others, self._about_others([questions[each] for each in others]), strict=True):
            answers[number] = answer
        return answers

    def _about_silences(self, questions: Sequence[Question]) -> list[str]:
        if not questions:
            return []
        now, stand = self.store.still_silent([silence_of(each.event_id) for each in questions])
        present = is_back([each for each in stand if isinstance(each, str)])
        return [
            "answered" if not stands or stands in present else _stale(question, now)
            for question, stands in zip(questions, stand, strict=True)
        ]

    def _about_others(self, questions: Sequence[Question]) -> list[str]:
        if not questions:
            return []
        heard_at = self.store.last_frames([each.user_id for each in questions])
        return [
            "conversation" if heard and heard > question.event_at else ""
            for question, heard in zip(questions, heard_at, strict=True)
        ]


def _stale(question: Question, now: datetime) -> str:
    """A guide message that comes minutes late guides nobody. Late is counted from when its node wanted it."""
    return "stale" if now - (question.planned_at or question.event_at) > settings.AFTERTOUCH_SILENCE_STALE else ""


def silence_of(event_id: str) -> tuple[str, int]:
    """The session and the arming that an event's id names. Somebody else's id names none: its silence stands."""
    session_id, _, armed_at = event_id.rpartition(":")
    return (session_id, int(armed_at)) if armed_at.isascii() and armed_at.isdigit() else (event_id, 0)
