"""List all periodic passes."""

from __future__ import annotations

from typing import Any


def tick_entry(task: str, seconds: float) -> dict[str, Any]:
    """Return the entry of an idempotent pass.

    It has no `expires`: Celery compares that with the worker's clock. A worker whose clock was some seconds ahead
    dropped every pass. Beat stops publishing passes while none are consumed (see `config.celery.beat_scheduler`).
    """
    return {"task": task, "schedule": seconds, "options": {"queue": "ticks"}}


SCHEDULE = {
    # ledger
    "hand over what falls due": tick_entry("scheduling.hand_over", 5),
    "bring back what was lost": tick_entry("scheduling.rescue", 5),
    # RPA
    "hand over jobs that fall due": tick_entry("rpa_tasks.hand_over", 5),
    "bring back lost runs, wake who sleeps": tick_entry("rpa_tasks.keep_moving", 5),
    # retention
    "forget what is old": tick_entry("scheduling.forget", 60),
    # live chats
    "count what guide messages bring about": tick_entry("chat_sessions.count_nudges", 10),
    # customers
    "find who stays away": tick_entry("scheduling.scan_inactive", 60),
    # operations
    "let canaries grow, or pause them": tick_entry("scheduling.advance_rollouts", 60),
    "replay what a draft would do": tick_entry("scheduling.what_if", 5),
    "go on with bulk actions": tick_entry("scheduling.bulk", 5),
}

#: Passes that run every few seconds. Beat logs their publication. Worker logs and Flower omit them; `/metrics` has
#: the time of the last run.
PASSES = frozenset(each["task"] for each in SCHEDULE.values())
