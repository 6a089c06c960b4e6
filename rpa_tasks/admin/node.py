from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.decorators import display

from rpa_tasks.admin import live
from rpa_tasks.jobs.pick import NODE_SILENT
from rpa_tasks.models import ExecutionNode, Job
from scheduling.admin.base import ReadOnlyAdmin
from scheduling.admin.labels import translate_reason
from scheduling.monitoring.duration_text import describe_duration

UNITS = (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1))
TONES = {"busy": "info", "idle": "success", "quarantined": "danger"}
STATES = {
    "busy": _("in use"), "idle": _("pre-warmed"), "quarantined": _("quarantined"), "empty": _("empty"),
}  # fmt: skip


def has_stopped_reporting(row: ExecutionNode) -> bool:
    """Return whether the node has stopped reporting. Its shops may run on other nodes."""
    return row.seen_at < now() - NODE_SILENT


@admin.register(ExecutionNode)
class ExecutionNodeAdmin(ReadOnlyAdmin):
    list_display = ("name", "shown_state", "seen", "slots", "running", "browser_counts", "queue_names")
    actions = None

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow deletion of a node that has stopped reporting; a running one would report itself again."""
        may = request.user.has_perm("rpa_tasks.delete_executionnode")
        return bool(may and obj is not None and has_stopped_reporting(obj))

    @display(description=_("state"))  # type: ignore[untyped-decorator]
    def shown_state(self, row: ExecutionNode) -> str:
        if has_stopped_reporting(row):
            return live.render_tag(gettext("no report"), "danger")
        return live.render_tag(gettext("alive"), "success")

    @display(description=_("last heard of"), ordering="seen_at")  # type: ignore[untyped-decorator]
    def seen(self, row: ExecutionNode) -> str:
        return format_age(row.seen_at)

    @display(description=_("running jobs"))  # type: ignore[untyped-decorator]
    def running(self, row: ExecutionNode) -> str:
        return f"{self.jobs_of(row).count()} / {row.slots}"

    @display(description=_("browsers"))  # type: ignore[untyped-decorator]
    def browser_counts(self, row: ExecutionNode) -> str:
        counts = Counter(each.get("state", "") for each in row.browsers)
        tags = [
            (live.render_tag(f"{STATES[state]} {counts[state]}", TONES[state]),) for state in TONES if counts[state]
        ]
        return format_html_join(" ", "{}", tags) or f"0 / {len(row.browsers)}"

    @display(description=_("queues"))  # type: ignore[untyped-decorator]
    def queue_names(self, row: ExecutionNode) -> str:
        return format_html('<span class="at-mono">{}</span>', ", ".join(row.serves) or "–")

    def jobs_of(self, row: ExecutionNode) -> QuerySet[Job]:
        return Job.objects.filter(state="running", node=row.name).select_related("shop__platform", "flow")

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        row = self.get_row_or_404(request, object_id)
        return self.page(
            request, "rpa_tasks/node.html", gettext("Execution node"), original=row, node=row, subtitle=None,
            state=self.shown_state(row), gone=has_stopped_reporting(row), seen=format_age(row.seen_at),
            up=format_age(row.started_at), browsers=[_browser_row(each) for each in row.browsers],
            jobs=[{"job": job, "bar": live.render_progress(job)} for job in self.jobs_of(row)],
            delete_link=self.url("delete", row.pk) if self.has_delete_permission(request, row) else "",
        )  # fmt: skip


def _browser_row(browser: dict[str, Any]) -> dict[str, Any]:
    """Prepare a slot, as reported by its node, for the page."""
    state = str(browser.get("state", ""))
    return {
        **browser,
        "words": STATES.get(state, state),
        "tone": TONES.get(state, "default"),
        "age": format_age(_parse_instant(browser.get("started_at"))),
        "used": format_age(_parse_instant(browser.get("last_used_at"))),
        "why": translate_reason(str(browser.get("reason") or "")),
    }


def _parse_instant(text: Any) -> datetime | None:
    return parse_datetime(text) if isinstance(text, str) else None


def format_age(at: datetime | None) -> str:
    """Format an age in the largest unit that fits."""
    if at is None:
        return "–"
    span = now() - at
    if span < timedelta(seconds=1):
        return gettext("now")
    unit = next(each for each in UNITS if span >= each)
    return gettext("%(span)s ago") % {"span": describe_duration(span // unit * unit)}
