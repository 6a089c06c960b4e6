"""Browsers of this node, one per shop, which all worker processes share through the state directory."""

from __future__ import annotations

from rpa_tasks.browsers.errors import BROWSER_FAILED, BROWSER_WAIT, DISK_FULL, PROFILE_BUSY, NoBrowser
from rpa_tasks.browsers.pool import Borrowed, borrow

__all__ = ["BROWSER_FAILED", "BROWSER_WAIT", "DISK_FULL", "PROFILE_BUSY", "Borrowed", "NoBrowser", "borrow"]
