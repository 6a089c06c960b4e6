"""Register the pages of the back office. Importing a module registers its models."""

from __future__ import annotations

from scheduling.admin.experiments import replay, rollout
from scheduling.admin.failed_tasks import bulk_action, failed_task
from scheduling.admin.matrix import channel, community, grid, node, rules, template
from scheduling.admin.system import access, accounts, alert, schedule
from scheduling.admin.touches import complaint, customer, event, pause, touch

__all__ = [
    "access", "accounts", "alert", "bulk_action", "channel", "community", "complaint", "customer", "event",
    "failed_task", "grid", "node", "pause", "replay", "rollout", "rules", "schedule", "template", "touch",
]  # fmt: skip
