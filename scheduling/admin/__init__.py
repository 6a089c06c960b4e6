"""Register the pages of the back office. Importing a module registers its models."""

from __future__ import annotations

from scheduling.admin import experiments, sign_in, user
from scheduling.admin.failed_tasks import bulk_action, failed_task
from scheduling.admin.matrix import channel, grid, node, rules, template
from scheduling.admin.system import access, notifications, schedule
from scheduling.admin.touches import customer, customer_import, pause, touch

__all__ = [
    "access", "bulk_action", "channel", "customer", "customer_import", "experiments", "failed_task", "grid",
    "node", "notifications", "pause", "rules", "schedule", "sign_in", "template", "touch", "user",
]  # fmt: skip
