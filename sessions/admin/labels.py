"""What live chats add to the sidebar."""

from __future__ import annotations

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

MENU: list[tuple[str | Promise, list[tuple[str | Promise, str, str, str]]]] = [
    (
        _("Live chats"),
        [
            (_("Live overview"), "forum", "chat_sessions_live", "chat_sessions.view_silencepolicy"),
            (_("Silence policies"), "hourglass_bottom", "chat_sessions_silencepolicy_changelist",
             "chat_sessions.view_silencepolicy"),
            (_("Campaigns"), "campaign", "chat_sessions_campaign_changelist", "chat_sessions.view_campaign"),
        ],
    ),
]  # fmt: skip
