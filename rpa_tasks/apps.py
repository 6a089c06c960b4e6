from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class RpaTasksConfig(AppConfig):
    name = "rpa_tasks"
    verbose_name = _("RPA")

    def ready(self) -> None:
        from rpa_tasks import (
            checks,  # noqa: F401  (registers the system checks)
            configuration,  # noqa: F401  (gives the models their rules)
        )
