"""Who is in a live conversation right now, asked at fire time. Other apps answer, by `settings.PRESENCE`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Protocol

from django.conf import settings
from django.utils.module_loading import import_string


@dataclass(frozen=True, slots=True)
class Question:
    """May this touch still go out?"""

    user_id: str
    chat_id: str
    event_type: str
    event_id: str
    event_at: datetime
    planned_at: datetime | None = None  #: when its node wanted it to go out


class Presence(Protocol):
    def objections(self, questions: Sequence[Question]) -> Sequence[str]:
        """For each question "" (go on), "conversation" (the customer is talking), "answered" (this very silence is
        over) or "presence_unknown". It may raise: then nobody knows, and every touch is held for 30 s."""


@cache
def providers() -> tuple[Presence, ...]:
    return tuple(import_string(path)() for path in settings.PRESENCE)


def objections(questions: Sequence[Question]) -> list[str]:
    """The first objection of any provider, for each question."""
    answers = [""] * len(questions)
    for provider in providers():
        try:
            found = provider.objections(questions)
        except Exception:
            found = ["presence_unknown"] * len(questions)
        answers = [mine or theirs for mine, theirs in zip(answers, found, strict=True)]
    return answers
