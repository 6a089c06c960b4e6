from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin, messages
from django.db.models import Count, Q
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from rpa_tasks.admin import labels
from rpa_tasks.browser_settings import uses_browser_elsewhere
from rpa_tasks.jobs import nodes
from rpa_tasks.jobs.ledger import NODE_SILENT
from rpa_tasks.jobs.shops import unpin_matching_shops
from rpa_tasks.models import RUN_JOBS, ExecutionNode, Job, LoginState, Run
from scheduling.admin.base import Confirmation, ReadOnlyAdmin, RowPage, ops_display, row_action
from scheduling.admin.labels import translate_reason
from scheduling.admin.shown_values import render_tag, render_time
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
class ExecutionNodeAdmin(RowPage, ReadOnlyAdmin):
    list_display = ("name", "shown_state", "seen", "running", "free_slots", "shops", "browser_counts", "queue_names")
    actions = None
    actions_detail = ("drain", "resume", "release_shops")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow deletion of a node that has stopped reporting; a running one would report itself again."""
        may = request.user.has_perm("rpa_tasks.delete_executionnode")
        return bool(may and obj is not None and has_stopped_reporting(obj))

    @ops_display(description=_("state"))
    def shown_state(self, row: ExecutionNode) -> str:
        if has_stopped_reporting(row):
            tag = render_tag(gettext("no report"), "danger")
        else:
            tag = render_tag(gettext("alive"), "success")
        return format_html("{} {}", tag, render_tag(gettext("drained"), "warning") if row.draining_at else "")

    @ops_display(description=_("last heard of"), ordering="seen_at")
    def seen(self, row: ExecutionNode) -> str:
        return format_age(row.seen_at)

    @ops_display(description=_("running jobs"))
    def running(self, row: Any) -> str:
        return f"{row.load.running} / {row.slots}"

    @ops_display(description=_("free slots"))
    def free_slots(self, row: Any) -> int:
        return nodes.count_free_slots(row, row.load, reports=not has_stopped_reporting(row))

    @ops_display(description=_("pinned shops, with due jobs"))
    def shops(self, row: Any) -> str:
        return f"{row.load.pinned} / {row.load.waiting}"

    @ops_display(description=_("browsers"))
    def browser_counts(self, row: ExecutionNode) -> str:
        counts = Counter(each.get("state", "") for each in row.browsers)
        tags = [(render_tag(f"{STATES[state]} {counts[state]}", TONES[state]),) for state in TONES if counts[state]]
        return format_html_join(" ", "{}", tags) or f"0 / {len(row.browsers)}"

    @ops_display(description=_("queues"))
    def queue_names(self, row: ExecutionNode) -> str:
        return format_html('<span class="at-mono">{}</span>', ", ".join(row.serves) or "–")

    def load_rows(self, rows: Iterable[Any]) -> None:
        loads = nodes.measure_loads([row.name for row in rows])
        for row in rows:
            row.load = loads[row.name]

    def show_row(self, request: HttpRequest, row: ExecutionNode) -> HttpResponse:
        row.load = nodes.measure_loads([row.name])[row.name]  # type: ignore[attr-defined]
        running = Job.objects.filter(state="running", node=row.name).select_related("shop__platform", "flow")
        return self.page(
            request, "rpa_tasks/node.html", row.name, original=row, node=row,
            state=self.shown_state(row), gone=has_stopped_reporting(row), seen=format_age(row.seen_at),
            up=format_age(row.started_at), warm=describe_warm_share(row), free=self.free_slots(row),
            browsers=[_browser_row(each) for each in row.browsers],
            jobs=[{"job": job, "bar": labels.render_progress(job)} for job in running],
            take_overs=nodes.open_take_overs().filter(node=row.name).select_related("shop__platform"),
            shops=_shop_rows(row) if request.user.has_perm("rpa_tasks.view_shop") else [], shops_shown=SHOPS_SHOWN,
            links=self.action_links(request, row),
            delete_link=self.url("delete", row.pk) if self.has_delete_permission(request, row) else "",
        )  # fmt: skip

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        row = self.get_row_or_404(request, object_id)
        if row.draining_at and request.method == "GET":
            messages.warning(request, gettext("The node is drained. If it comes back after this, it takes jobs."))
        return super().delete_view(request, object_id, extra_context)  # type: ignore[no-any-return]

    @row_action(permission="scheduling.add_pause", allowed=lambda row: row.draining_at is None)
    def drain(self, request: HttpRequest, row: ExecutionNode) -> Confirmation:
        load = nodes.measure_loads([row.name])[row.name]
        pinned = gettext("Shops whose browser profile is on this node: %(count)s") % {"count": load.pinned}
        return Confirmation(
            title=gettext("Drain the node “%(node)s”?") % {"node": row.name}, button=gettext("Drain"),
            text=gettext("Running jobs and take-overs continue to their end; no new ones start here. Shops of "
                         "platforms that wait for the preferred node wait until you resume the node or release them. "
                         "The drain lasts over a restart."),
            facts=[gettext("Running jobs: %(count)s") % {"count": load.running}, pinned],
            act=lambda: nodes.drain_node(row.name, by=request.user.get_username()),
            done=gettext("The node starts nothing new."),
        )  # fmt: skip

    @row_action(permission="scheduling.delete_pause", allowed=lambda row: row.draining_at)
    def resume(self, request: HttpRequest, row: ExecutionNode) -> Confirmation:
        return Confirmation(
            title=gettext("Resume the node “%(node)s”?") % {"node": row.name}, button=gettext("Resume"),
            text=gettext("The node takes jobs again, and its shops continue."),
            act=lambda: nodes.resume_node(row.name, by=request.user.get_username()),
            done=gettext("The node takes jobs again."),
        )  # fmt: skip

    @row_action(permission=RUN_JOBS, allowed=lambda row: row.load.pinned)
    def release_shops(self, request: HttpRequest, row: ExecutionNode) -> Confirmation:
        load = nodes.measure_loads([row.name])[row.name]

        def act() -> None:
            done = unpin_matching_shops(by=request.user.get_username(), node=row.name)
            self.log_change(request, row, gettext("Shops released: %(count)s.") % {"count": done.released})
            words = gettext("%(released)s shops are free to move; %(running)s run at this moment and stay.")
            messages.success(request, words % {"released": done.released, "running": done.running})

        return Confirmation(
            title=gettext("Release the %(count)s shops of this node?") % {"count": load.pinned},
            text=gettext("Nodes with room take the shops, each with a browser profile of its own: the platform may "
                         "ask for logins again. Shops that run at this moment keep their node."),
            button=gettext("Yes, release them"), act=act,
        )  # fmt: skip


SHOPS_SHOWN = 200


def _shop_rows(row: ExecutionNode) -> list[dict[str, Any]]:
    """Prepare the first shops that are pinned to the node."""
    pinned: Any = nodes.pinned_shops(row.name)[:SHOPS_SHOWN]
    return [
        {
            "shop": shop, "link": reverse("admin:rpa_tasks_shop_change", args=[shop.pk]), "waiting": shop.waiting,
            "success": format_age(shop.lane.last_success_at),
            "only_here": shop.login_state == LoginState.OK and not uses_browser_elsewhere(shop),
        }
        for shop in pinned
    ]  # fmt: skip


def describe_warm_share(row: ExecutionNode) -> str:
    """Describe the share of the node's runs with a browser that found it running, in the last 24 hours."""
    ended = Run.objects.filter(node=row.name, ended_at__gt=Now() - timedelta(days=1)).exclude(outcome="held")
    found, warm = ended.aggregate(all=Count("warm"), found=Count("pk", filter=Q(warm=True))).values()
    if not found:
        return "–"
    words = gettext("%(share)s %% (%(warm)s of %(all)s)")
    return words % {"share": round(100 * warm / found), "warm": warm, "all": found}


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
    """Format the age of an instant in the largest unit that fits."""
    if at is None:
        return "–"
    span = now() - at
    if span < timedelta(seconds=1):
        return render_time(at, gettext("now"))
    unit = next(each for each in UNITS if span >= each)
    return render_time(at, gettext("%(span)s ago") % {"span": describe_duration(span // unit * unit)})
