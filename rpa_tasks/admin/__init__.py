"""The back office of RPA. One module a noun; importing them registers their pages."""

from __future__ import annotations

from rpa_tasks.admin import flow, job, labels, node, platform, shop

__all__ = ["flow", "job", "labels", "node", "platform", "shop"]
