"""The back office. One module a noun; importing them registers their pages."""

from __future__ import annotations

from scheduling.admin import (
    access,
    alert,
    bulk,
    channel,
    community,
    complaint,
    customer,
    event,
    failed_task,
    guarded_rollout,
    node,
    pause,
    people,
    rule,
    schedule,
    stage,
    template,
    touch,
    what_if,
)

__all__ = [
    "access", "alert", "bulk", "channel", "community", "complaint", "customer", "event", "failed_task",
    "guarded_rollout", "node", "pause", "people", "rule", "schedule", "stage", "template", "touch", "what_if",
]  # fmt: skip
