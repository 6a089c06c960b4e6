"""Celery configuration. `celery -A config` finds the application here."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Load the application on demand, because settings import `schedule` and `queues` before they are complete."""
    if name == "app":
        from config.celery.application import app

        return app
    raise AttributeError(name)
