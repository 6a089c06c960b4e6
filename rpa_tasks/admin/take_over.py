"""Pages of take-overs: the live browser of a shop, and the record of all take-overs."""

from __future__ import annotations

from ipaddress import ip_address

from django.contrib import admin, messages
from django.db.models import OuterRef, Subquery
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext, gettext_lazy
from django.utils.translation import gettext_lazy as _

from rpa_tasks.admin.platform import Pausing
from rpa_tasks.admin.run_job import RUN_JOBS
from rpa_tasks.configuration.browser_settings import uses_browser_elsewhere
from rpa_tasks.jobs import gates
from rpa_tasks.models import Lane, LoginState, Shop, TakeOver, TakeOverEnd
from rpa_tasks.takeover import leases
from rpa_tasks.takeover.leases import CannotTakeOver
from rpa_tasks.takeover.page_socket import PERMISSION
from scheduling.admin.base import Confirmation, ReadOnlyAdmin, row_action
from scheduling.admin.labels import translate_reason

LATEST_SHOWN = 10
PROBLEMS = {
    "taken": gettext_lazy("Another operator has taken over the shop."),
    "retired": gettext_lazy("The shop is retired."),
    "no_node": gettext_lazy("No execution node reports."),
    "node_lost": gettext_lazy("The shop's preferred node does not report. Its login is only there."),
    "node_drained": gettext_lazy("The shop's preferred node is drained. Resume it, or release the shop."),
}


def subquery_of_operator() -> Subquery:
    """Return the name of the operator who has taken over the shop of the outer query."""
    rows = TakeOver.objects.filter(shop=OuterRef("pk"), ended_at=None, lease_until__gt=Now())
    return Subquery(rows.values("username")[:1])


def describe_failed_check(lane: Lane) -> str:
    return gettext("check: %(reason)s") % {"reason": translate_reason(lane.check_reason)}


def is_in_use(shop: Shop) -> bool:
    return shop.retired_at is None


class TakeOverPages(Pausing):
    """The take-over of a shop as a page of the shop, and the report that it is logged in."""

    @row_action(_("Take over"), icon="desktop_windows", permission=PERMISSION, allowed=is_in_use)
    def take_over(self, request: HttpRequest, shop: Shop) -> HttpResponse:
        if request.method == "POST":
            return self._act_on_take_over(request, shop)
        row = leases.open_take_over(shop.pk)
        latest = TakeOver.objects.filter(shop=shop).exclude(ended_at=None)[:LATEST_SHOWN]
        answer: HttpResponse = self.page(
            request, "rpa_tasks/take_over.html", gettext("Take over the browser of “%(shop)s”") % {"shop": shop},
            original=shop, shop=shop, row=row, controls=bool(row and row.user_id == request.user.pk), latest=latest,
            needs_login=shop.login_state == LoginState.NEEDED, may_continue=request.user.has_perm("rpa_tasks.run_job"),
            elsewhere=uses_browser_elsewhere(shop), check_flow=gates.find_check_flow(shop.platform),
            back=self.url("change", shop.pk),
        )  # fmt: skip
        answer["Cache-Control"] = "no-store"
        return answer

    def _act_on_take_over(self, request: HttpRequest, shop: Shop) -> HttpResponse:
        if request.POST.get("do") == "start":
            try:
                leases.start_take_over(shop.pk, user=request.user, address=client_address(request))  # type: ignore[arg-type]
            except CannotTakeOver as error:
                messages.error(request, PROBLEMS[error.reason])
            return redirect(request.path)
        row = leases.open_take_over(shop.pk)
        if row is not None and row.user_id == request.user.pk:
            self._end_take_over(request, shop, row)
        return redirect(self.url("change", shop.pk))

    def _end_take_over(self, request: HttpRequest, shop: Shop, row: TakeOver) -> None:
        """Ask for the end first: a check of the login starts when the take-over has freed the shop."""
        continues = request.POST.get("do") == "continue" and request.user.has_perm("rpa_tasks.run_job")
        continues = continues and shop.retired_at is None
        leases.request_end(row, TakeOverEnd.CONTINUED if continues else TakeOverEnd.ENDED)
        if shop.retired_at:
            messages.error(request, PROBLEMS["retired"])
            return
        if continues:
            gates.check_login(shop.pk, by=request.user.get_username())
        if continues and gates.find_check_flow(shop.platform):
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
        if flow := gates.find_check_flow(row.platform):
            facts.append(gettext("The flow %(flow)s checks the login first.") % {"flow": flow.task_type})
            done = gettext("The login is being checked. Then the jobs of the shop continue.")
        else:
            facts.append(gettext("The platform has no login check: your report counts."))
            done = gettext("The jobs of the shop continue.")
        return Confirmation(
            title=gettext("Is “%(what)s” logged in again?") % {"what": row}, button=gettext("Yes, it is logged in"),
            text=gettext("Confirm once you have logged in with the shop's browser profile. What waits for it "
                         "starts at once; a run that still finds no login asks again."),
            facts=facts, act=lambda: gates.check_login(row.pk, by=request.user.get_username()), done=done,
            unchanged=gettext("No login was needed any more, or a check of it is open."),
            refused=translate_reason("retired"),
        )  # fmt: skip


def client_address(request: HttpRequest) -> str:
    """Return the address of the client as the web server reports it, or ""."""
    try:
        return str(ip_address(request.META.get("REMOTE_ADDR", "")))
    except ValueError:
        return ""


@admin.register(TakeOver)
class TakeOverAdmin(ReadOnlyAdmin):
    """The record of take-overs. What was typed is not in it."""

    list_display = ("shop", "username", "address", "node", "started_at", "ended_at", "end")
    list_filter = ("end",)
    search_fields = ("=username", "=shop__shop_id")
    list_select_related = ("shop__platform",)
    fields = ("shop", "task_id", "username", "address", "node", "started_at", "ended_at", "end")
