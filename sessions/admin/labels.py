"""Define the sidebar entries and translated terms of live chats."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from scheduling.admin.labels import register_labels
from scheduling.admin.sidebar import Entry, Group, Tab

MENU: tuple[Group, ...] = (
    (
        _("Live chats"),
        (
            Entry(
                "forum",
                (
                    Tab(_("Live overview"), "chat_sessions_live", "chat_sessions.view_silencepolicy"),
                    Tab(_("Silence policies"), "chat_sessions_silencepolicy_changelist",
                        "chat_sessions.view_silencepolicy"),
                    Tab(_("Campaigns"), "chat_sessions_campaign_changelist", "chat_sessions.view_campaign"),
                ),
            ),
        ),
    ),
)  # fmt: skip


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
)

#: State of a chat, with the tone of its label.
STATES = {
    "idle": (_("no timer"), ""),
    "armed": (_("timer running"), "info"),
    "paused": (_("paused"), "warning"),
    "silent": (_("silent"), "warning"),
    "closed": (_("closed"), ""),
}
SIDES = {"customer": _("customer"), "agent": _("agent"), "bot": _("bot")}

#: Why the timer of a chat runs or not (see `SessionSnapshot.why`).
WHY = {
    "no_message": _("the customer has not written yet"),
    "customer_wrote": _("the customer wrote last; the timer runs after a message of an agent"),
    "agent_wrote": _("an agent wrote last; the timer runs after a message of the customer"),
    "unknown_writer": _("Redis lost the chat; the timer starts after the next message"),
    "policy_changed": _("the policy changed; the next frame starts the timer"),
    "tool": _("a tool is running"),
    "transfer": _("the chat is being transferred"),
    "queue": _("the chat waits in a queue"),
    "armed": _("the timer runs"),
    "outside_hours": _("outside the opening hours; the timer continues when they start"),
    "silent": _("a silence was recorded; the next message starts the timer"),
    "closed": _("the chat is closed"),
}
