"""Read and write the verdicts and attempts of touches, wherever their rows are stored."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from scheduling.models import Attempt, Touch, Verdict


def list_verdicts(**lookups: Any) -> list[Verdict]:
    """Return the verdicts of the touches that match, by touch and time."""
    found = Touch.objects.filter(**lookups).order_by("pk").values_list("verdicts", flat=True)
    return [each for verdicts in found for each in verdicts]


def list_attempts(**lookups: Any) -> list[Attempt]:
    """Return the attempts of the touches that match, by time."""
    found = Touch.objects.filter(**lookups).values_list("attempts", flat=True)
    return sorted((each for attempts in found for each in attempts), key=lambda each: each.started_at)


def add_verdicts(task_id: UUID, *verdicts: Verdict) -> None:
    Touch.objects.filter(pk=task_id).update(verdicts=[*list_verdicts(pk=task_id), *verdicts])


def add_attempts(task_id: UUID, *attempts: Attempt) -> None:
    Touch.objects.filter(pk=task_id).update(attempts=[*list_attempts(pk=task_id), *attempts])
