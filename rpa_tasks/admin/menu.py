"""What RPA adds to the sidebar."""

from __future__ import annotations

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

MENU: list[tuple[str | Promise, list[tuple[str | Promise, str, str, str]]]] = [
    (
        _("RPA"),
        [
            (_("Shops"), "storefront", "rpa_tasks_shop_changelist", "rpa_tasks.view_shop"),
            (_("Jobs"), "smart_toy", "rpa_tasks_job_changelist", "rpa_tasks.view_job"),
            (_("Schedules of shops"), "event_repeat", "rpa_tasks_shop_schedules", "rpa_tasks.view_shop"),
            (_("Platforms"), "store", "rpa_tasks_platform_changelist", "rpa_tasks.view_platform"),
            (_("Flows"), "terminal", "rpa_tasks_flow_changelist", "rpa_tasks.view_flow"),
            (_("Execution nodes"), "dns", "rpa_tasks_executionnode_changelist", "rpa_tasks.view_executionnode"),
            (_("Demo orders"), "receipt_long", "rpa_tasks_demoorder_changelist", "rpa_tasks.view_demoorder"),
        ],
    ),
]  # fmt: skip
