"""Define the sidebar entries and translated terms of live chats."""

from __future__ import annotations

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from scheduling.admin.labels import register_labels

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


#: Plain name of a table, shown in the list of permissions.
PLAIN = (gettext_noop("nudge mark"),)

register_labels(
    {
        "no_session": _("The customer has no chat that is open"),
        "inapp_away": _("The live sessions cannot be reached, trying again"),
        "inapp_busy": _("Too many messages wait for the live sessions, trying again"),
        "stale": _("Too late for a guide message"),
    },
    {},
    ((r"must be later than starts_at", gettext_noop("must be later than the start")),),
)
