from __future__ import annotations

from typing import Any

import pytest

from rpa_tasks.jobs import wakeups


@pytest.fixture
def sent_wakeups(monkeypatch) -> list[Any]:
    """Collect the wake-ups; nothing is published."""
    published: list[Any] = []
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", published.extend)
    return published
