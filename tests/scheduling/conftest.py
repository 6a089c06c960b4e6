"""Limits for a slow machine: one that stalls for seconds leaves nothing of a batch, loses no lease and can undo."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest


@pytest.fixture(autouse=True)
def _patient_limits() -> Iterator[None]:
    """A batch is judged in 3 s, started within 20 s and leased for 45 s. What comes later waits for another wake-up.

    An undo is offered for 10 s.
    """
    from scheduling.delivery import outgoing, pipeline, sender
    from scheduling.operations import undo

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "LONGEST_JUDGING", 60.0)
        patched.setattr(outgoing, "BATCH_DEADLINE", timedelta(seconds=100))
        for module in (pipeline, sender):
            patched.setattr(module, "LEASE", timedelta(seconds=200))
        patched.setattr(undo, "UNDO_WINDOW", timedelta(minutes=10))
        yield
