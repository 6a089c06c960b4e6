"""What of live chats is worth waking somebody for (see `scheduling.monitoring.alerting.rules`)."""

from __future__ import annotations

import operator

from django.utils.translation import gettext_lazy as _

from scheduling.monitoring.alerting.rules import Condition

CONDITIONS = [
    Condition(
        "no_watcher", "aftertouch_watchers", _("Nobody watches the live chats"),
        _("Start a watcher; silences noticed more than five minutes late are not answered any more."), limit=1,
        beyond=operator.lt, page="admin:chat_sessions_live",
    ),
    Condition(
        "store", "aftertouch_watchers", _("Redis does not answer"),
        _("Bring it back. Chats are armed again by their next ping; quotas let nothing out meanwhile."), missing=True,
        page="admin:chat_sessions_live",
    ),
]  # fmt: skip
