"""Admin pages of RPA, one module per noun. Importing the modules registers their pages."""

from __future__ import annotations

from rpa_tasks.admin import flow, job, labels, node, platform, shop

__all__ = ["flow", "job", "labels", "node", "platform", "shop"]
