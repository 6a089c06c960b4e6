"""What of RPA is worth waking somebody for (see `scheduling.monitoring.alerting.rules`)."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from scheduling.monitoring.alerting.rules import Condition

CONDITIONS = [
    Condition(
        "rpa_platform_rests", "aftertouch_rpa_breaker_open", _("%(what)s turns RPA runs away"),
        _("Its jobs wait and go on by themselves; look whether it asks for a captcha or is down."), label="platform",
        page="admin:rpa_tasks_platform_changelist",
    ),
]  # fmt: skip
