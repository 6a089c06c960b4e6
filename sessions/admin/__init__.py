"""Register the back-office pages of live chats on import. One module per noun."""

from __future__ import annotations

from sessions.admin import policies

__all__ = ["policies"]
