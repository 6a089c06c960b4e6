"""Register the pages of the back office. Importing a module registers its models."""

from __future__ import annotations

from scheduling.admin import draft, sign_in, user
from scheduling.admin.failed_tasks import bulk_action, failed_task
from scheduling.admin.matrix import channel, grid, node, rules, template
from scheduling.admin.system import access, alert, schedule, webhook
from scheduling.admin.touches import customer, customer_import, event, pause, touch

__all__ = [
    "access", "alert", "bulk_action", "channel", "customer", "customer_import", "draft", "event", "failed_task", "grid",
    "node", "pause", "rules", "schedule", "sign_in", "template", "touch", "user", "webhook",
]  # fmt: skip
