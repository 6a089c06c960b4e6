"""Labels for the codes of runs, jobs and checks, live cells (see scheduling/live.js), and pages of the demo tables."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.utils.functional import Promise
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext, gettext_lazy, gettext_noop
from django.utils.translation import gettext_lazy as _

from rpa_tasks.jobs.shops import needs_login
from rpa_tasks.models import DemoOrder, DemoWatermark, Job, Shop
from scheduling.admin.base import OpsAdmin, ReadOnlyAdmin, table_page
from scheduling.admin.navigation import Entry, Group, Tab

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


MENU: tuple[Group, ...] = (
    (
        _("RPA"),
        (
            Entry(
                "storefront",
                (
                    Tab(_("Shops"), "rpa_tasks_shop_changelist"),
                    Tab(_("Schedules of shops"), "rpa_tasks_shop_schedules", "rpa_tasks.view_shop"),
                    Tab(_("Take-overs"), "rpa_tasks_takeover_changelist"),
                    Tab(_("Platforms"), "rpa_tasks_platform_changelist"),
                ),
                waiting=lambda: Shop.objects.filter(needs_login()),
                counted=_("Login needed"),
            ),
            Entry("smart_toy", (Tab(_("Jobs"), "rpa_tasks_job_changelist"),)),
            Entry(
                "terminal",
                (
                    Tab(_("Flows"), "rpa_tasks_flow_changelist"),
                    Tab(_("Execution nodes"), "rpa_tasks_executionnode_changelist"),
                    Tab(_("Demo orders"), "rpa_tasks_demoorder_changelist"),
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


MOST_IDS = 200  #: rows whose cells a page requests at once


class LiveTable(OpsAdmin):
    """A list whose page requests cells of its rows again: see scheduling/live.js."""

    live_columns: ClassVar[tuple[str, ...]]  #: each shows a `live_cell`

    def is_alive(self, row: Any) -> bool:
        """Return whether the cells of the row may change."""
        raise NotImplementedError

    def live_cell(self, row: Any, name: str, content: Any) -> SafeString:
        return format_html(
            '<span id="{0}-{1}" data-live="{2}" data-row="{0}"{3}>{4}</span>',
            row.pk, name, self.url("live"), SafeString(" data-live-again") if self.is_alive(row) else "", content,
        )  # fmt: skip

    @table_page("live/", "view")
    def live(self, request: HttpRequest) -> HttpResponse:
        pks = []
        for each in request.GET.get("ids", "").split(",")[:MOST_IDS]:
            with suppress(ValidationError):
                pks.append(self.opts.pk.to_python(each))
        rows = self.get_queryset(request).filter(pk__in=pks)
        cells = [(getattr(self, name)(row),) for row in rows for name in self.live_columns]
        response = HttpResponse(format_html_join("", "{}", cells))
        response["Cache-Control"] = "no-store"
        return response


class OfPlatform(OpsAdmin):
    """A page of rows that belong to a platform: new ones get one in use."""

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        field: Any = super().formfield_for_foreignkey(db_field, request, **kwargs)
        if field is not None:
            field.queryset = field.queryset.filter(retired_at=None)
        return field


def render_progress(job: Job) -> SafeString:
    """Render the progress that a running job reports."""
    if job.progress is None:
        return format_html(
            '<span class="at-quiet">{}</span>', job.progress_message or gettext("no progress reported yet")
        )
    percent = round(100 * min(max(job.progress, 0), 1))
    return format_html(
        '<span class="at-progress" title="{1}"><progress max="100" value="{0}">{0} %</progress><b>{0} %</b>'
        '<span class="at-quiet">{1}</span></span>',
        percent, job.progress_message,
    )  # fmt: skip
