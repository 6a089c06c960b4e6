"""Celery configuration. `celery -A config` finds the application here."""

from __future__ import annotations

import sys
from typing import Any

from config.environment import ROOT


def __getattr__(name: str) -> Any:
    """Load the application on demand, because settings import `schedule` and `queues` before they are complete."""
    if name == "app":
        # The script `celery` has its own folder on the path, and the checkout only while it imports this module.
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))
        from config.celery.application import app

        return app
    raise AttributeError(name)
