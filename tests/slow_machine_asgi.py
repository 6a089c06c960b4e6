"""The web process for tests, with the time limits of a slow machine."""

from __future__ import annotations

from config.asgi import application
from tests.slow_machine import raise_time_limits

__all__ = ["application"]

raise_time_limits("event_lock")  # the API answers within 10 s
