"""When a browser has served long enough. They rot: slower and fatter with every page, while every probe stays green."""

from __future__ import annotations

import time

from django.conf import settings

from rpa_tasks.browsers.browser_processes import memory_by_session
from rpa_tasks.browsers.registry import Record


def reason(record: Record) -> str:
    """Why it should be replaced; empty: it should not."""
    if record.uses >= settings.AFTERTOUCH_RPA_BROWSER_USES:
        return "uses"
    if time.time() - record.started_at >= settings.AFTERTOUCH_RPA_BROWSER_AGE.total_seconds():
        return "age"
    if memory_by_session().get(record.pid, 0) // 2**20 >= settings.AFTERTOUCH_RPA_BROWSER_MEMORY_MB:
        return "memory"
    return ""
