"""Describe durations in the active language."""

from __future__ import annotations

from datetime import timedelta

from django.utils.translation import gettext as _
from django.utils.translation import ngettext


def describe_duration(span: timedelta | None) -> str:
    """Return at most the two largest units: `15 minutes`, `2 hours`, `7 days`."""
    if span is None:
        return "–"
    seconds = round(span.total_seconds())
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    parts = [
        ngettext("%d day", "%d days", days) % days if days else "",
        ngettext("%d hour", "%d hours", hours) % hours if hours else "",
        ngettext("%d minute", "%d minutes", minutes) % minutes if minutes else "",
        ngettext("%d second", "%d seconds", seconds % 60) % (seconds % 60) if seconds % 60 else "",
    ]
    return " ".join([part for part in parts if part][:2]) or _("at once")
