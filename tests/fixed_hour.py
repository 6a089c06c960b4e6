"""A clock for tests that count by the hour."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import time_machine
from django.utils.timezone import now


@pytest.fixture
def fixed_hour() -> Iterator[None]:
    """No hour ends, and so no day, while somebody looks. Never ahead, where a login would be over."""
    at = now().replace(minute=30, second=0, microsecond=0)
    with time_machine.travel(at if at < now() else at - timedelta(hours=1), tick=True):
        yield
