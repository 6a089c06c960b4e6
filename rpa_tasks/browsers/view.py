"""The node's browsers as the back office shows them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.conf import settings

from rpa_tasks.browsers import registry
from rpa_tasks.browsers.browser_processes import memory_by_session

EMPTY = "empty"


def describe() -> list[dict[str, Any]]:
    """One entry a slot, also for an empty one. Instants are ISO 8601, UTC."""
    memory = memory_by_session()
    return [
        {
            "slot": slot,
            "state": record.state if record else EMPTY,
            "shop": record.shop if record else "",
            "profile": record.profile if record else "",
            "port": record.port or None if record else None,
            "uses": record.uses if record else 0,
            "started_at": _instant(record.started_at) if record else None,
            "last_used_at": _instant(record.last_used_at) if record else None,
            "rss_mb": memory.get(record.pid, 0) // 2**20 if record and record.pid else 0,
            "reason": record.reason if record else "",
        }
        for slot, record in registry.records(settings.AFTERTOUCH_RPA_BROWSERS).items()
    ]


def _instant(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None
