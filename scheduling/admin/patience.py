"""Pages open while everything burns: what would take too long to count is not counted."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from django.db import OperationalError

from scheduling import sql

T = TypeVar("T")

PATIENCE = "2s"


def patiently(count: Callable[[], T], patience: str = "") -> T | None:
    """What `count` reads, or None where a statement of it takes longer, by default than `PATIENCE`."""
    try:
        with sql.within(patience or PATIENCE):
            return count()
    except OperationalError:
        return None


class Patience:
    """Shared by everything that one page counts: what comes last gets what the others left."""

    ENOUGH = 0.05  #: seconds, below which it is not worth beginning
    EACH = 2.0  #: seconds at most

    def __init__(self, seconds: float) -> None:
        self._ends_at = monotonic() + seconds

    def __call__(self, count: Callable[[], T]) -> T | None:
        left = min(self.EACH, self._ends_at - monotonic())
        return patiently(count, f"{round(left * 1000)}ms") if left > self.ENOUGH else None
