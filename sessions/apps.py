from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class SessionsConfig(AppConfig):
    name = "sessions"
    label = "chat_sessions"  # "sessions" is Django's own label
    verbose_name = _("Live chats")

    def ready(self) -> None:
        from sessions import checks, configuration  # noqa: F401  (register themselves)
        from sessions.detection import policies

        policies.push_policies_on_save()
