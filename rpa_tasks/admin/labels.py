"""Labels for the codes of runs, jobs and checks, and admin pages of the demo tables."""

from __future__ import annotations

from django.contrib import admin
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy, gettext_noop
from django.utils.translation import gettext_lazy as _

from rpa_tasks.models import DemoOrder, DemoWatermark, LoginState, Shop
from scheduling.admin.base import ReadOnlyAdmin
from scheduling.admin.labels import register_labels
from scheduling.admin.sidebar import MOST_COUNTED, Entry, Group, Tab

STATE_TONES = {
    "scheduled": "default", "queued": "default", "running": "info", "succeeded": "success", "cancelled": "warning",
    "failed": "danger", "unknown": "danger",
}  # fmt: skip

#: Reasons why a job waits or ended, and outcomes of runs.
REASONS: dict[str, str | Promise] = {
    "browser_wait": gettext_lazy("No browser was free in time"),
    "browser_failed": gettext_lazy("Browser did not start"),
    "proxy_failed": gettext_lazy("Shop's proxy does not work, or is not used"),
    "profile_busy": gettext_lazy("Shop's browser profile is in use"),
    "not_isolated": gettext_lazy("Command cannot be isolated on this node"),
    "disk_full": gettext_lazy("Disk of the node is full"),
    "processes_left": gettext_lazy("Processes of an earlier run are still there"),
    "survivors": gettext_lazy("some of its processes could not be ended"),
    "node_stopping": gettext_lazy("Node was stopping"),
    "runner_lost": gettext_lazy("Worker lost during the run"),
    "lease_lost": gettext_lazy("Worker did not renew its lease"),
    "supervisor_lost": gettext_lazy("Supervisor process of the run was killed"),
    "not_started": gettext_lazy("Command could not be started"),
    "directory_missing": gettext_lazy("Working directory is missing on the node, or isolation hides it"),
    "command_missing": gettext_lazy("Command was not found on the node"),
    "command_not_executable": gettext_lazy("Command is not executable"),
    "command_not_valid": gettext_lazy("Command of the flow is not valid"),
    "arguments_too_long": gettext_lazy("Payload is too long for a command line"),
    "payload_reserved": gettext_lazy("Payload has members that the run sets"),
    "no_result": gettext_lazy("Ended without its result line"),
    "login_needed": gettext_lazy("Shop needs a login"),
    "cancelled": gettext_lazy("Cancelled"),
    "retired": gettext_lazy("Shop, flow or platform was retired"),
    "rpa_refused": gettext_lazy("RPA job was refused"),
    "rpa_backlog": gettext_lazy("Too many RPA jobs wait already"),
    "database_unavailable": gettext_lazy("Database did not answer"),
}
PREFIXES = {
    "exit_": gettext_noop("Ended with exit code %s"),
    "signal_": gettext_noop("Killed by signal %s"),
}
register_labels(REASONS, PREFIXES)


def count_needed_logins() -> int:
    """Count the shops that wait for a login, as far as a badge shows."""
    return Shop.objects.filter(login_state=LoginState.NEEDED, retired_at=None).order_by()[: MOST_COUNTED + 1].count()


MENU: tuple[Group, ...] = (
    (
        _("RPA"),
        (
            Entry(
                "storefront",
                (
                    Tab(_("Shops"), "rpa_tasks_shop_changelist", "rpa_tasks.view_shop"),
                    Tab(_("Schedules of shops"), "rpa_tasks_shop_schedules", "rpa_tasks.view_shop"),
                    Tab(_("Take-overs"), "rpa_tasks_takeover_changelist", "rpa_tasks.view_takeover"),
                    Tab(_("Platforms"), "rpa_tasks_platform_changelist", "rpa_tasks.view_platform"),
                ),
                count=count_needed_logins, counted=_("Login needed"),
            ),
            Entry("smart_toy", (Tab(_("Jobs"), "rpa_tasks_job_changelist", "rpa_tasks.view_job"),)),
            Entry(
                "terminal",
                (
                    Tab(_("Flows"), "rpa_tasks_flow_changelist", "rpa_tasks.view_flow"),
                    Tab(_("Execution nodes"), "rpa_tasks_executionnode_changelist", "rpa_tasks.view_executionnode"),
                    Tab(_("Demo orders"), "rpa_tasks_demoorder_changelist", "rpa_tasks.view_demoorder"),
                ),
            ),
        ),
    ),
)  # fmt: skip


@admin.register(DemoOrder)
class DemoOrderAdmin(ReadOnlyAdmin):
    list_display = ("order_no", "shop_id", "status", "buyer", "amount", "version", "writes")
    search_fields = ("=order_no", "=shop_id")


@admin.register(DemoWatermark)
class DemoWatermarkAdmin(ReadOnlyAdmin):
    list_display = ("shop_id", "position", "lease_no")
