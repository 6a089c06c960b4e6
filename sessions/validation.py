"""What silence policies and campaigns may say, for the admin's forms and for configuration files: values by the names
of the model's fields, absent ones are passed over, and one `InvalidInput` names everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from scheduling.durations import format_duration
from scheduling.errors import Findings

#: The watcher looks at least once a second; what is armed for longer than that cannot be missed.
MIN_THRESHOLD, MAX_THRESHOLD = timedelta(seconds=2), timedelta(hours=12)
MAX_JITTER = timedelta(hours=1)
MAX_GRACE = timedelta(minutes=10)


def check_policy(values: Mapping[str, Any]) -> None:
    found = Findings()
    found.key(values, "tag")
    _check_threshold(values, found)
    found.span(values, "jitter", most=MAX_JITTER)
    found.span(values, "grace", most=MAX_GRACE)
    found.number(values, "max_nudges", 1, 10)
    found.number(values, "growth", 1, 10)
    found.settle()


def check_campaign(values: Mapping[str, Any]) -> None:
    found = Findings()
    found.key(values)
    _check_threshold(values, found)
    starts_at, ends_at = values.get("starts_at"), values.get("ends_at")
    if starts_at and ends_at and ends_at <= starts_at:
        found.add("ends_at", "must be later than starts_at")
    found.settle()


def _check_threshold(values: Mapping[str, Any], found: Findings) -> None:
    threshold = values.get("threshold")
    if threshold is not None and not MIN_THRESHOLD <= threshold <= MAX_THRESHOLD:
        bounds = f"{format_duration(MIN_THRESHOLD)} and {format_duration(MAX_THRESHOLD)}"
        found.add("threshold", f"must be between {bounds}")
