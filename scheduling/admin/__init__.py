"""Register the pages of the back office. Importing a module registers its models."""

from __future__ import annotations

from scheduling.admin.experiments import draft
from scheduling.admin.failed_tasks import bulk_action, failed_task
from scheduling.admin.matrix import channel, community, grid, node, rules, template
from scheduling.admin.people import invitation, site_pages, user
from scheduling.admin.system import access, alert, audit, schedule, webhook
from scheduling.admin.touches import complaint, customer, customer_import, event, pause, touch

__all__ = [
    "access", "alert", "audit", "bulk_action", "channel", "community", "complaint", "customer",
    "customer_import", "draft", "event", "failed_task", "grid", "invitation", "node", "pause", "rules",
    "schedule", "site_pages", "template", "touch", "user", "webhook",
]  # fmt: skip
