"""Who is in a live conversation right now, asked at fire time. Other apps answer, by `settings.PRESENCE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import ClassVar, Protocol

import structlog
from django.conf import settings
from django.utils.module_loading import import_string

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """May this touch still go out?"""

    user_id: str
    chat_id: str
    event_type: str
    event_id: str
    event_at: datetime
    planned_at: datetime | None = None  #: when its node wanted it to go out
    going_out: bool = False  #: without an objection it is sent right after this question


class Presence(Protocol):
    #: The provider's own events. It is asked about all touches of theirs, also where the node ignores conversations.
    event_types: ClassVar[frozenset[str]]

    def objections(self, questions: Sequence[Question]) -> Sequence[str]:
        """For each question "" (go on), "conversation" (the customer is talking), "answered" (this very silence is
        over) or "presence_unknown": the touch is held for 30 s. If it raises, the answer to all is unknown.

        A touch is asked about when it is judged, and again right before the sender marks it: `going_out` is true in
        the last question only, and a provider must count nothing before that one."""


@cache
def providers() -> tuple[Presence, ...]:
    return tuple(import_string(path)() for path in settings.PRESENCE)


def own_event_types() -> list[str]:
    """The events about whose touches a provider is always asked."""
    return sorted({each for provider in providers() for each in provider.event_types})


def objections(questions: Sequence[Question]) -> list[str]:
    """The first objection of any provider, for each question."""
    answers = [""] * len(questions)
    if not questions:
        return answers
    for provider in providers():
        try:
            found = provider.objections(questions)
        except Exception:
            log.warning("presence_unknown", questions=len(questions), exc_info=True)
            found = ["presence_unknown"] * len(questions)
        answers = [mine or theirs for mine, theirs in zip(answers, found, strict=True)]
    return answers
