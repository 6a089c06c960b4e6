"""List all periodic passes."""

from __future__ import annotations

from typing import Any


def tick_entry(task: str, seconds: float, queue: str = "ticks") -> dict[str, Any]:
    """Return the entry of an idempotent pass.

    It has no `expires`: Celery compares that with the worker's clock. A worker whose clock was some seconds ahead
    dropped every pass. Beat stops publishing passes while none are consumed (see `config.celery.beat_scheduler`).
    """
    return {"task": task, "schedule": seconds, "options": {"queue": queue}}


SCHEDULE = {
    # ledger
    "dispatch due touches": tick_entry("scheduling.dispatch_due", 5),
    "rescue lost touches": tick_entry("scheduling.rescue", 5),
    # RPA
    "dispatch due jobs": tick_entry("rpa_tasks.dispatch_due", 5),
    "rescue lost runs and wake idle nodes": tick_entry("rpa_tasks.rescue", 5),
    # journeys
    "record ends of followed touches": tick_entry("scheduling.follow_touches", 5),
    # retention
    "delete expired data": tick_entry("scheduling.delete_expired", 60, "long"),
    # customers
    "find inactive customers": tick_entry("scheduling.scan_inactive", 60),
    "erase customers": tick_entry("scheduling.erase_customers", 10, "long"),
    # outgoing webhooks
    "send webhooks": tick_entry("scheduling.request_webhooks", 5),
    # operations
    "advance roll-outs": tick_entry("scheduling.advance_rollouts", 60, "long"),
    "run replays": tick_entry("scheduling.run_replay", 5, "long"),
    "continue bulk actions": tick_entry("scheduling.continue_bulk_actions", 5, "long"),
    "continue imports": tick_entry("scheduling.continue_imports", 5, "long"),
}

#: Passes that run every few seconds. Beat logs their publication. Worker logs and Flower omit them; `/metrics` has
#: the time of the last run.
PASSES = frozenset(each["task"] for each in SCHEDULE.values())
