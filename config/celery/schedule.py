"""Every tick on one screen."""

from __future__ import annotations

from typing import Any


def tick(task: str, seconds: float) -> dict[str, Any]:
    """Return the entry of a pass that is safe to run twice.

    It names no `expires`: Celery compares that with the worker's clock, and a worker whose clock is some seconds ahead
    dropped every pass. Where no worker takes passes, beat stops to publish them (see `config.celery.beat_scheduler`).
    """
    return {"task": task, "schedule": seconds, "options": {"queue": "ticks"}}


SCHEDULE = {
    # the ledger
    "hand over what falls due": tick("scheduling.hand_over", 5),
    "bring back what was lost": tick("scheduling.rescue", 5),
    # RPA
    "hand over jobs that fall due": tick("rpa_tasks.hand_over", 5),
    "bring back lost runs, wake who sleeps": tick("rpa_tasks.keep_moving", 5),
    # what is over long enough
    "forget what is old": tick("scheduling.forget", 60),
    # live chats
    "count what guide messages bring about": tick("chat_sessions.count_nudges", 10),
    # customers
    "find who stays away": tick("scheduling.scan_inactive", 60),
    # ops
    "let canaries grow, or pause them": tick("scheduling.advance_rollouts", 60),
    "replay what a draft would do": tick("scheduling.what_if", 5),
    "go on with bulk actions": tick("scheduling.bulk", 5),
}

#: What passes every few seconds. Beat's log says when it sent one; workers' logs and Flower say nothing of each, and
#: `/metrics` has when each last passed.
PASSES = frozenset(each["task"] for each in SCHEDULE.values())
