"""Register the app with its system checks, and the site of the back office."""

from __future__ import annotations

from django.apps import AppConfig
from django.contrib.admin import apps as admin_apps  # its `AdminConfig` would be a second default here
from django.utils.translation import gettext_lazy as _


class SchedulingConfig(AppConfig):
    name = "scheduling"
    verbose_name = _("Outreach")

    def ready(self) -> None:
        from scheduling import (
            audit,  # noqa: F401  (connects the signals)
            checks,  # noqa: F401  (registers the system checks)
        )
        from scheduling.configuration import validation  # noqa: F401  (gives the models their rules)
        from scheduling.delivery import admission
        from scheduling.ledger.touches import quota_slots_freed
        from scheduling.operations.periodic_rows import allow_unknown_time_zones

        allow_unknown_time_zones()
        quota_slots_freed.connect(admission.return_quota_slots)


class BackOfficeConfig(admin_apps.AdminConfig):
    default = False  # "scheduling" among the apps means `SchedulingConfig`
    default_site = "scheduling.web.back_office.BackOffice"
