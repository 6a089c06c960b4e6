"""Admin pages of shops and take-overs: list with live state, login, pause, unpin, bulk actions, search, browser."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce, JSONObject, Now
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timezone import now
from django.utils.translation import gettext, gettext_lazy
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter, RelatedDropdownFilter

from rpa_tasks.admin import labels
from rpa_tasks.admin.job import breaker_blocks_until
from rpa_tasks.admin.labels import STATE_TONES, LiveTable, OfPlatform
from rpa_tasks.admin.node import format_age
from rpa_tasks.admin.platform import BrowserForm, Pausing, browser_section
from rpa_tasks.admin.run_job import MOST_AT_ONCE, RunPages
from rpa_tasks.browser_settings import find_browser_address, map_browsers_to_shops, uses_browser_elsewhere
from rpa_tasks.configuration import check_shop, map_profiles_to_shops
from rpa_tasks.jobs import shops
from rpa_tasks.jobs.shops import count_waiting_jobs, is_being_checked, needs_login
from rpa_tasks.models import RUN_JOBS, TAKE_OVER_SHOPS, Job, JobState, LoginState, Shop, TakeOver, TakeOverEnd
from rpa_tasks.takeover import leases
from rpa_tasks.takeover.leases import CannotTakeOver
from scheduling.admin.base import (
    Confirmation,
    HistoryAdmin,
    ReadOnlyAdmin,
    Retirable,
    RetiredFilter,
    ops_action,
    ops_display,
    row_action,
)
from scheduling.admin.dashboard.charts import Figure
from scheduling.admin.labels import translate_reason
from scheduling.admin.navigation import MOST_READ, Finder, Found, fits_term
from scheduling.admin.shown_values import format_instant, insert_values, render_tag
from scheduling.audit import read_client_address
from scheduling.ids import parse_number, parse_uuid, reveal_odd_characters
from scheduling.models import FailedTask
from scheduling.monitoring.duration_text import describe_duration

LATEST_SHOWN = 10
PROBLEMS = {
    "taken": gettext_lazy("Another operator has taken over the shop."),
    "retired": gettext_lazy("The shop is retired."),
    "no_node": gettext_lazy("No execution node reports."),
    "node_lost": gettext_lazy("The shop's preferred node does not report. Its login is only there."),
    "node_drained": gettext_lazy("The shop's preferred node is drained. Resume it, or release the shop."),
}


def is_in_use(shop: Shop) -> bool:
    return shop.retired_at is None


@admin.register(TakeOver)
class TakeOverAdmin(ReadOnlyAdmin):
    """The record of take-overs. What was typed is not in it."""

    list_display = ("shop", "username", "address", "node", "started_at", "ended_at", "end")
    list_filter = ("end",)
    search_fields = ("=username", "=shop__shop_id")
    list_select_related = ("shop__platform",)
    fields = ("shop", "task_id", "username", "address", "node", "started_at", "ended_at", "end")


class ShopForm(BrowserForm):
    """Form without pause and login, which are buttons: saving an old form must not start or stop jobs."""

    class Meta:
        model = Shop
        exclude = ("version", "retired_at", "paused", "login_state", "login_lost_at", *BrowserForm.written_columns)
        help_texts: ClassVar[Any] = {
            "shop_id": _("The platform's own id of the shop; it can't be changed later."),
            "profile_id": _(
                "Empty: the platform's key, “-” and the shop id. Its browser keeps its login there; never shared."
            ),
            "dedicated_queue": _(
                "Jobs go to queue s.PLATFORM.SHOP, dots as “:”, instead of the shared ones. A node must consume it."
            ),
            "backlog_limit": _("Queue limit: further jobs are rejected while this number waits."),
        }

    def check(self, values: Any, /) -> None:
        platform = values.get("platform") or getattr(self.instance, "platform", None)
        known = {
            "platform": platform.key if platform else "",
            "shop_id": values.get("shop_id") or self.instance.shop_id,
        }
        others = Shop.objects.select_related("platform").exclude(pk=self.instance.pk)
        template = platform.browser.get("cdp_url", "") if platform else ""
        inherited = find_browser_address("", template, known["shop_id"] or "")
        check_shop({**values, **known}, map_profiles_to_shops(others), map_browsers_to_shops(others), inherited)


#: Filters of the list by state, for shops that come from `annotate_work`.
STATES = {
    "login": (gettext_lazy("Login needed"), needs_login()),
    "resting": (gettext_lazy("Resting"), Q(platform__breaker__open_until__gt=Now())),
    "paused": (gettext_lazy("Paused"), Q(paused=True) | Q(platform__paused=True)),
    "full": (gettext_lazy("Backlog full"), Q(waiting__gte=F("backlog_limit"))),
    "running": (JobState.RUNNING.label, Q(lane__task_id__isnull=False)),
    "waiting": (gettext_lazy("Waiting"), Q(waiting__gt=0)),
}


def annotate_work(shops: QuerySet[Shop]) -> QuerySet[Shop]:
    """Annotate each shop with `waiting`, the number of waiting jobs, `run`, the running job or None, and `operator`.

    The operator has taken over the shop.
    """
    running = Job.objects.filter(pk=OuterRef("lane__task_id"))
    running_job = JSONObject(
        pk="pk", since="sending_at", progress="progress", message="progress_message", task_type="flow__task_type"
    )
    # The open failed tasks of a shop's jobs that ended after its last success. Few tasks are open.
    since = Coalesce(OuterRef("lane__last_success_at"), Value(datetime.min.replace(tzinfo=UTC)))
    jobs = Job.objects.filter(pk=OuterRef("task_id"), shop=OuterRef(OuterRef("pk")))
    failures = FailedTask.objects.filter(Exists(jobs), state="open", origin="rpa_job", failed_at__gt=since)
    operators = TakeOver.objects.filter(shop=OuterRef("pk"), ended_at=None, lease_until__gt=Now())
    return shops.select_related("platform__breaker", "lane").annotate(
        waiting=count_waiting_jobs(),
        run=Subquery(running.values(running_job=running_job)[:1]),
        operator=Subquery(operators.values("username")[:1]),
        checked=is_being_checked(),
        has_failure=Exists(failures),
    )


def state_of(shop: Any) -> tuple[str, str]:
    """Return tone and text for the state of the shop."""
    if shop.retired_at:
        return "default", gettext("Retired")
    if shop.operator:
        return "info", gettext("Taken over by %(name)s") % {"name": shop.operator}
    if shop.login_state == LoginState.NEEDED:
        return ("info", gettext("Login is being checked")) if shop.checked else ("danger", gettext("Login needed"))
    if shop.paused or shop.platform.paused:
        return "warning", gettext("Paused") if shop.paused else gettext("Platform paused")
    if shop.waiting >= shop.backlog_limit:
        return "danger", gettext("Backlog full")
    if shop.run:
        return "info", str(JobState.RUNNING.label)
    if breaker_blocks_until(shop.platform):
        return "danger", gettext("Resting")
    if shop.waiting:
        return "default", gettext("Waiting")
    return ("danger", gettext("Last run failed")) if shop.has_failure else ("success", gettext("Idle"))


def work_of(shop: Any) -> SafeString | str:
    """Return the running job with its progress, or what the shop waits for."""
    if shop.run:
        return render_running_job(shop.run)
    if shop.login_state == LoginState.NEEDED and shop.login_lost_at and not shop.checked:
        since = insert_values(gettext("since %(time)s"), time=format_instant(shop.login_lost_at))
        if not shop.lane.check_reason:
            return since
        check = gettext("check: %(reason)s") % {"reason": translate_reason(shop.lane.check_reason)}
        return format_html("{} · {}", since, check)
    if until := breaker_blocks_until(shop.platform):
        return insert_values(gettext("next try at %(time)s"), time=format_instant(until))
    return "–"


def render_running_job(run: dict[str, Any]) -> SafeString:
    job = Job(progress=run["progress"], progress_message=run["message"] or "")
    since = parse_datetime(run["since"]) if run["since"] else None
    return format_html(
        '<a class="at-link" href="{}">{}</a> <span class="at-quiet at-nowrap">{}</span><br>{}',
        reverse("admin:rpa_tasks_job_change", args=[run["pk"]]), run["task_type"],
        gettext("for %(span)s") % {"span": describe_duration(now() - since)} if since else gettext("beginning"),
        labels.render_progress(job),
    )  # fmt: skip


def count_shops_by_state() -> list[Figure]:
    """Count the active shops: all, running ones, and those in each state that operators should know."""
    link = reverse("admin:rpa_tasks_shop_changelist")
    shown = {"running": "", "login": "bad", "resting": "bad", "paused": "bad"}
    counts = {name: Count("pk", filter=STATES[name][1]) for name in shown}
    found = Shop.objects.filter(retired_at=None).aggregate(all=Count("pk"), **counts)
    return [
        Figure(gettext("Shops"), found["all"], link),
        *(
            Figure(STATES[name][0], found[name], f"{link}?state={name}", tone if found[name] else "")
            for name, tone in shown.items()
        ),
    ]


JOBS_SHOWN = 10


class StateFilter(DropdownFilter):  # type: ignore[misc]
    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, words) for name, (words, _condition) in STATES.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Shop]) -> QuerySet[Shop]:
        return queryset.filter(STATES[self.value()][1]) if self.value() in STATES else queryset


@admin.register(Shop)
class ShopAdmin(LiveTable, RunPages, Pausing, OfPlatform, HistoryAdmin, Retirable):
    form = ShopForm
    list_display = ("name_and_id", "platform", "state_tag", "work", "backlog", "last_success", "home", "buttons")
    live_columns = ("state_tag", "work", "backlog", "last_success")
    list_filter = (StateFilter, ("platform", RelatedDropdownFilter), RetiredFilter)
    list_filter_submit = True
    list_per_page = 100
    list_before_template = "rpa_tasks/shop_figures.html"
    change_form_outer_after_template = "rpa_tasks/shop_jobs.html"
    search_fields = ("=shop_id", "name")
    readonly_fields = ("state_tag", "work", "backlog", "last_success", "home", "profile_name", "version")
    fixed_fields = ("platform", "shop_id")
    actions = ("run_selected", "release_selected")
    actions_detail = (
        "run_now", "take_over", "confirm_login", "leave_home", "pause_row", "resume_row", "retire", "bring_back",
    )  # fmt: skip
    pauses = staticmethod(shops.pause_shop)
    resumes = staticmethod(shops.resume_shop)

    def has_run_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(RUN_JOBS)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        fields = ("platform", ("shop_id", "name"), "profile_id", ("backlog_limit", "dedicated_queue"))
        if obj is None:
            return [(None, {"fields": (*fields, "change_reason")}), browser_section(obj)]
        return [
            (_("Now"), {"fields": (("state_tag", "work"), ("backlog", "last_success"), ("home", "profile_name"))}),
            (_("Settings"), {"fields": fields}),
            browser_section(obj),
            (_("Life"), {"fields": ("version", "change_reason")}),
        ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Shop]:
        return annotate_work(super().get_queryset(request))

    def in_use(self, row: Shop) -> bool:
        return row.jobs.exists() or row.take_overs.exists()

    # --- the board ----------------------------------------------------------------------------------------------

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        context = {
            "figures": count_shops_by_state() if self.has_view_permission(request) else [],
            **(extra_context or {}),
        }
        return super().changelist_view(request, context)  # type: ignore[no-any-return]

    def is_alive(self, row: Shop) -> bool:
        return row.retired_at is None

    @ops_display(description=_("shop"), ordering="shop_id")
    def name_and_id(self, row: Shop) -> str:
        shop_id = reveal_odd_characters(row.shop_id)
        more = format_html('<br><span class="at-quiet">{}</span>', shop_id) if row.name else ""
        return format_html("{}{}", row.name or shop_id, more)

    @ops_display(description=_("state"))
    def state_tag(self, row: Any) -> SafeString:
        tone, words = state_of(row)
        return self.live_cell(row, "state", render_tag(words, tone))

    @ops_display(description=_("work"))
    def work(self, row: Any) -> SafeString:
        return self.live_cell(row, "work", work_of(row))

    @ops_display(description=_("waiting"), ordering="waiting")
    def backlog(self, row: Any) -> SafeString:
        text = f"{row.waiting} / {row.backlog_limit}"
        full = row.waiting >= row.backlog_limit
        return self.live_cell(row, "backlog", format_html('<span class="at-bad">{}</span>', text) if full else text)

    @ops_display(description=_("last success"), ordering="lane__last_success_at")
    def last_success(self, row: Any) -> SafeString:
        at = row.lane.last_success_at
        return self.live_cell(row, "success", format_age(at) if at else gettext("never"))

    @ops_display(description=_("preferred node"), ordering="lane__home")
    def home(self, row: Any) -> str:
        return row.lane.home or "–"

    @ops_display(description="")
    def buttons(self, row: Any) -> str:
        """Render the buttons. `get_list_display` omits them for users without permission."""
        links = [(self._run_page(row.pk), gettext("Run now"))]
        if row.login_state == LoginState.NEEDED:
            links[:0] = [
                (self.url("take_over", row.pk), gettext("Take over")),
                (self.url("confirm_login", row.pk), gettext("Confirm login")),
            ]
        shown = format_html_join(" ", '<a class="at-button at-slim" href="{}">{}</a>', links)
        return format_html('<span class="at-nowrap">{}</span>', shown)

    def get_list_display(self, request: HttpRequest) -> Any:
        shown = super().get_list_display(request)
        return shown if self.has_run_permission(request) else [name for name in shown if name != "buttons"]

    # --- one shop -------------------------------------------------------------------------------------------------

    @ops_display(description=_("browser profile"))
    def profile_name(self, row: Shop) -> str:
        return reveal_odd_characters(row.profile)

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        context = dict(extra_context or {})
        if request.user.has_perm("rpa_tasks.view_job") and (shop := parse_number(object_id)):
            rows = Job.objects.filter(shop_id=shop).select_related("flow").defer("payload", "result")
            context["jobs"] = [
                {"job": job, "tone": STATE_TONES[job.state]} for job in rows.order_by("-pk")[:JOBS_SHOWN]
            ]
            context["jobs_link"] = f"{reverse('admin:rpa_tasks_job_changelist')}?shop__id__exact={object_id}"
        return super().change_view(request, object_id, form_url, context)

    @ops_action(description=_("Run now"), permissions=["run"])
    def run_selected(self, request: HttpRequest, queryset: QuerySet[Shop]) -> HttpResponse:
        return redirect(self._run_page(*queryset.values_list("pk", flat=True)[: MOST_AT_ONCE + 1]))

    def _run_page(self, *pks: int) -> str:
        return f"{self.url('run_now_many')}?shops={','.join(map(str, pks))}"

    @ops_action(description=_("Release the preferred node"), permissions=["run"])
    def release_selected(self, request: HttpRequest, queryset: QuerySet[Shop]) -> HttpResponse | None:
        """Ask for confirmation: the shops may need a login on the next node."""
        rows = queryset.filter(retired_at=None).order_by("pk")
        if "confirmed" not in request.POST:
            homes = rows.exclude(lane__home="").values_list("lane__home").annotate(Count("pk")).order_by("lane__home")
            chosen = [("_selected_action", pk) for pk in rows.values_list("pk", flat=True)]
            asked = Confirmation(
                title=gettext("Release the preferred node of %(count)s shops?") % {"count": rows.count()},
                text=gettext("Nodes with room take the shops, each with a browser profile of its own: the platform may "
                             "ask for logins again. Shops that run at this moment keep their node."),
                facts=[f"{node}: {count}" for node, count in homes],
                hidden=[("action", "release_selected"), ("confirmed", "1"), *chosen],
                button=gettext("Yes, release them"), back=self.url("changelist"),
            )  # fmt: skip
            return self.ask(request, asked)
        done = shops.unpin_shops(list(rows.values_list("pk", flat=True)), by=request.user.get_username())
        words = gettext("%(released)s shops are free to move; %(running)s run at this moment and stay.")
        messages.success(request, words % {"released": done.released, "running": done.running})
        return None

    @row_action(_("Run now"), icon="play_arrow", permission=RUN_JOBS, allowed=is_in_use)
    def run_now(self, request: HttpRequest, row: Shop) -> HttpResponse:
        return redirect(self._run_page(row.pk))

    @row_action(
        _("Move to another node"), icon="moving", permission=RUN_JOBS,
        allowed=lambda row: row.lane.home and not row.retired_at,
    )  # fmt: skip
    def leave_home(self, request: HttpRequest, row: Shop) -> Confirmation:
        return Confirmation(
            title=gettext("Let another node serve “%(what)s”?") % {"what": row}, button=gettext("Yes, move it"),
            text=gettext("The next node that has room takes the shop, with a browser profile of its own: the "
                         "platform may ask for a login again."),
            facts=[gettext("Its profile is on node %(node)s now.") % {"node": row.lane.home}],
            act=lambda: bool(shops.unpin_shops([row.pk], by=request.user.get_username()).released),
            done=gettext("The next node that has room takes the shop."),
            unchanged=gettext("The shop has no preferred node, or a job of it is running there."),
            refused=translate_reason("retired"),
        )  # fmt: skip

    # --- the take-over, and the report that the shop is logged in ---------------------------------------------------

    @row_action(_("Take over"), icon="desktop_windows", permission=TAKE_OVER_SHOPS, allowed=is_in_use)
    def take_over(self, request: HttpRequest, shop: Shop) -> HttpResponse:
        if request.method == "POST":
            return self._act_on_take_over(request, shop)
        row = leases.open_take_over(shop.pk)
        latest = TakeOver.objects.filter(shop=shop).exclude(ended_at=None)[:LATEST_SHOWN]
        answer: HttpResponse = self.page(
            request, "rpa_tasks/take_over.html", gettext("Take over the browser of “%(shop)s”") % {"shop": shop},
            original=shop, shop=shop, row=row, controls=bool(row and row.user_id == request.user.pk), latest=latest,
            needs_login=shop.login_state == LoginState.NEEDED, may_continue=request.user.has_perm(RUN_JOBS),
            elsewhere=uses_browser_elsewhere(shop), check_flow=shops.find_check_flow(shop.platform),
            back=self.url("change", shop.pk),
        )  # fmt: skip
        answer["Cache-Control"] = "no-store"
        return answer

    def _act_on_take_over(self, request: HttpRequest, shop: Shop) -> HttpResponse:
        if request.POST.get("do") == "start":
            try:
                leases.start_take_over(shop.pk, user=request.user, address=read_client_address(request))  # type: ignore[arg-type]
            except CannotTakeOver as error:
                messages.error(request, PROBLEMS[error.reason])
            return redirect(request.path)
        row = leases.open_take_over(shop.pk)
        if row is not None and row.user_id == request.user.pk:
            self._end_take_over(request, shop, row)
        return redirect(self.url("change", shop.pk))

    def _end_take_over(self, request: HttpRequest, shop: Shop, row: TakeOver) -> None:
        """Ask for the end first: a check of the login starts when the take-over has freed the shop."""
        continues = request.POST.get("do") == "continue" and request.user.has_perm(RUN_JOBS)
        continues = continues and shop.retired_at is None
        leases.request_end(row, TakeOverEnd.CONTINUED if continues else TakeOverEnd.ENDED)
        if shop.retired_at:
            messages.error(request, PROBLEMS["retired"])
            return
        if continues:
            shops.check_login(shop.pk, by=request.user.get_username())
        if continues and shops.find_check_flow(shop.platform):
            messages.success(request, gettext("The take-over ends. Then the login is checked, and the jobs continue."))
        else:
            messages.success(request, gettext("The take-over ends. Waiting jobs start in a few seconds."))

    @row_action(
        _("Confirm login"), icon="login", permission=RUN_JOBS,
        allowed=lambda row: row.login_state == LoginState.NEEDED and not row.retired_at,
    )  # fmt: skip
    def confirm_login(self, request: HttpRequest, row: Shop) -> Confirmation:
        facts = [gettext("Browser profile %(profile)s on node %(node)s.")
                 % {"profile": row.profile, "node": row.lane.home or "–"}]  # fmt: skip
        if flow := shops.find_check_flow(row.platform):
            facts.append(gettext("The flow %(flow)s checks the login first.") % {"flow": flow.task_type})
            done = gettext("The login is being checked. Then the jobs of the shop continue.")
        else:
            facts.append(gettext("The platform has no login check: your report counts."))
            done = gettext("The jobs of the shop continue.")
        return Confirmation(
            title=gettext("Is “%(what)s” logged in again?") % {"what": row}, button=gettext("Yes, it is logged in"),
            text=gettext("Confirm once you have logged in with the shop's browser profile. What waits for it "
                         "starts at once; a run that still finds no login asks again."),
            facts=facts, act=lambda: shops.check_login(row.pk, by=request.user.get_username()), done=done,
            unchanged=gettext("No login was needed any more, or a check of it is open."),
            refused=translate_reason("retired"),
        )  # fmt: skip


def find_shops(request: HttpRequest, term: str) -> Iterator[Found]:
    for row in Shop.objects.filter(retired_at=None).select_related("platform")[:MOST_READ]:
        if fits_term(term, row.platform.key, row.shop_id, row.name, row.platform.name):
            link = reverse("admin:rpa_tasks_shop_change", args=[row.pk])
            yield Found(
                _("Shop"), "storefront", str(row), link, f"{row.platform} · {reveal_odd_characters(row.shop_id)}"
            )


def find_jobs(request: HttpRequest, term: str) -> Iterator[Found]:
    """Find jobs by their full id or that of their touch."""
    if uuid := parse_uuid(term):
        for row in Job.objects.filter(Q(pk=uuid) | Q(touch_key=uuid)).select_related("shop__platform", "flow"):
            link = reverse("admin:rpa_tasks_job_change", args=[row.pk])
            yield Found(_("Job"), "smart_toy", f"{row.shop} · {row.flow.task_type}", link, row.get_state_display())


SEARCHES: tuple[Finder, ...] = (("rpa_tasks.view_shop", find_shops), ("rpa_tasks.view_job", find_jobs))
