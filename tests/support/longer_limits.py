"""The product's time limits for a slow machine: one that stalls for seconds is no server that is unavailable."""

from __future__ import annotations

from dataclasses import asdict, replace

from django.conf import settings

LEAST = 20.0  #: seconds


def raise_time_limits(*keep: str) -> None:
    """Raise the limits below `LEAST` to it, except those named."""
    raised = {name: max(LEAST, seconds) for name, seconds in asdict(settings.TIMEOUTS).items() if name not in keep}
    settings.TIMEOUTS = replace(settings.TIMEOUTS, **raised)
