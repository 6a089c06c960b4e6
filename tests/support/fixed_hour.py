"""A clock for tests that count by the hour."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import time_machine
from django.utils.timezone import now


@pytest.fixture
def fixed_hour() -> Iterator[None]:
    """Freeze the clock within an hour of the day. Never ahead, where a login would be expired."""
    at = now().replace(minute=30, second=0, microsecond=0)
    with time_machine.travel(at if at < now() else at - timedelta(hours=1), tick=True):
        yield
