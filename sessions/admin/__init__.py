"""The back office of live chats. One module a noun; importing them registers their pages."""

from __future__ import annotations

from sessions.admin import policies

__all__ = ["campaign", "policies"]
