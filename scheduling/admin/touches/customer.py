"""Pages of customers: eligibility for new touches, upcoming and past touches, events and complaints."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.db.models import F, Prefetch, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.decorators import display

from scheduling.admin.base import BigTable, CheckedForm, OpsAdmin
from scheduling.admin.form_fields import SettingsField
from scheduling.admin.labels import translate_error, translate_reason
from scheduling.admin.touches.timeline import format_instant, format_verdict_figure
from scheduling.configuration.validation import is_time_zone
from scheduling.models import WAITING, Complaint, Customer, Event, Touch, Verdict
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations import commands, preview
from scheduling.operations.preview import Eligibility, NodeVerdict
from scheduling.redaction import redact

SHOWN = 30  #: rows of each kind


def build_customer_context(request: HttpRequest, customer: Customer) -> dict[str, Any]:
    """Return what a customer's page shows beyond the form, limited to the user's rights."""
    may = request.user.has_perm
    context: dict[str, Any] = {
        "may_see_touches": may("scheduling.view_touch"),
        "may_see_events": may("scheduling.view_event"),
        "shown": SHOWN,
    }
    if context["may_see_touches"]:
        context |= _build_touches_context(customer)
        context["eligibility"] = _describe_eligibility(preview.check_eligibility(customer.spec(), now()), customer)
    if context["may_see_events"]:
        context |= _build_events_context(customer)
    if may("scheduling.view_complaint"):
        found = Complaint.objects.filter(customer=customer).select_related("touch__node").order_by("-pk")
        context["complaints"] = list(found[:SHOWN])
    return context


# --- eligibility ------------------------------------------------------------------------------------------------------


def _describe_eligibility(found: Eligibility, customer: Customer) -> dict[str, Any]:
    return {
        "open": found.is_open,
        "at": format_instant(found.opens_at) if found.opens_at else "",
        "wait": describe_duration(found.opens_at - now()) if found.opens_at and found.opens_at > now() else "",
        "rooms": [
            gettext("%(taken)s of %(limit)s in %(span)s")
            % {"taken": room.taken, "limit": room.rule.limit, "span": describe_duration(room.rule.window)}
            for room in found.rooms
        ],
        "nodes": [_describe_node_verdict(each) for each in found.answers],
        "marketing_only": customer.opted_out,
    }


def _describe_node_verdict(each: NodeVerdict) -> dict[str, Any]:
    verdict = each.verdict
    tones = {"send": ("success", gettext("May be sent")), "hold": ("warning", gettext("Would wait")),
             "suppress": ("danger", gettext("Would not be sent"))}  # fmt: skip
    tone, words = tones[verdict.decision]
    return {
        "node": each.node.key,
        "link": reverse("admin:scheduling_node_change", args=[each.node.id]),
        "tone": tone,
        "words": words,
        "why": translate_reason(verdict.rule) if verdict.rule else "",
        "figures": _format_verdict_figures(verdict),
        "again": format_instant(verdict.next_eligible_at) if verdict.next_eligible_at else "",
    }


# --- touches and events -----------------------------------------------------------------------------------------------


#: The verdict that explains why a touch waits or was not sent. A touch may have hundreds of others.
EXPLAINING = Prefetch(
    "verdicts", Verdict.objects.exclude(rule="").filter(rule=F("touch__reason")).order_by("-pk")[:1], "explaining"
)


def _build_touches_context(customer: Customer) -> dict[str, Any]:
    touches = Touch.objects.select_related("node", "event").prefetch_related(EXPLAINING)
    link = f"{reverse('admin:scheduling_touch_changelist')}?{urlencode({'q': customer.user_id})}"
    upcoming = touches.filter(customer=customer, state__in=WAITING).order_by("due_at")
    past = touches.filter(event__customer=customer).exclude(state__in=WAITING).order_by("-task_id")
    return {"upcoming": _describe_touches(upcoming), "past": _describe_touches(past), "touches_link": link}


def _describe_touches(rows: QuerySet[Touch]) -> list[dict[str, Any]]:
    from scheduling.admin.touches.touch import STATE_TONES

    return [
        {
            "row": row,
            "why": translate_reason("paused") if row.parked else translate_reason(row.reason),
            "tone": STATE_TONES[row.state],
            "figures": _format_verdict_figures(last) if (last := next(iter(row.explaining), None)) else "",  # type: ignore[attr-defined]
            "again": format_instant(last.next_eligible_at) if last and last.next_eligible_at else "",
        }
        for row in rows[:SHOWN]
    ]


def _format_verdict_figures(verdict: Any) -> str:
    """Format the observed value and the limit of a verdict."""
    return " / ".join(format_verdict_figure(each) for each in (verdict.observed, verdict.limit) if each)


def _build_events_context(customer: Customer) -> dict[str, Any]:
    events = Event.objects.filter(customer=customer)
    link = f"{reverse('admin:scheduling_event_changelist')}?{urlencode({'q': customer.user_id})}"
    return {"events": list(events.order_by("-pk")[:SHOWN]), "events_link": link}


class CustomerForm(CheckedForm):
    check = staticmethod(lambda values: None)

    addresses = SettingsField(label=_("addresses"), help_text=_("One a line: “email: ann@example.com”, “inapp: u1”."))

    class Meta:
        model = Customer
        fields: ClassVar[Any] = ("user_id", "name", "level", "locale", "timezone", "addresses", "opted_out")
        help_texts: ClassVar[Any] = {
            "level": _("For example vip or normal. The delay rule uses the level."),
            "opted_out": _("Suppresses marketing content. Service content is still sent."),
        }

    def clean_timezone(self) -> str:
        zone = self.cleaned_data["timezone"]
        if zone and not is_time_zone(zone):
            raise forms.ValidationError(translate_error(f"“{zone}” is not an IANA time zone"))
        return str(zone)


@admin.register(Customer)
class CustomerAdmin(BigTable, OpsAdmin):
    form = CustomerForm
    list_display = ("user_id", "name", "level", "locale", "opted_out", "last_active_at")
    list_filter = ("level", "opted_out")
    ordering = ("-pk",)
    search_fields = ("user_id",)
    search_help_text = _("User id, start of a user id, or full name")
    readonly_fields = ("opted_out_at", "last_active_at", "conversation_at", "created_at")
    shown_as: ClassVar[dict[str, str]] = {"addresses": "addresses_text"}
    fieldsets = (
        (None, {"fields": (("user_id", "name"), "level", ("locale", "timezone"), "addresses")}),
        (_("Consent"), {"fields": (("opted_out", "opted_out_at"),)}),
        (_("Behaviour"), {"fields": ("last_active_at", "conversation_at", "created_at")}),
    )
    change_form_outer_before_template = "ops/customer_now.html"
    change_form_outer_after_template = "ops/customer_touches.html"
    list_filter_submit = False

    def get_list_filter(self, request: HttpRequest) -> Any:
        """Omit the level: its choices would be read from the whole table."""
        return ("opted_out",)

    def get_readonly_fields(self, request: HttpRequest, obj: Customer | None = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        return [*fields, "user_id"] if obj else fields

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Customer], search_term: str
    ) -> tuple[QuerySet[Customer], bool]:
        term = search_term.strip()
        return (queryset.filter(Q(user_id__startswith=term) | Q(name=term)) if term else queryset), False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse deletion, so that touches of a customer stay readable."""
        return False

    def save_model(self, request: HttpRequest, obj: Customer, form: Any, change: bool) -> None:
        names = form.changed_data if change else [name for name in form.cleaned_data if name != "user_id"]
        changes = {name: form.cleaned_data[name] for name in names if name in CustomerForm.Meta.fields}
        obj.pk = commands.update_customer(obj.user_id, changes).pk

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        row = self.get_object(request, unquote(object_id))
        context = build_customer_context(request, row) if row else {}
        return super().change_view(request, object_id, form_url, {**context, **(extra_context or {})})

    @display(description=_("addresses"))  # type: ignore[untyped-decorator]
    def addresses_text(self, row: Customer) -> str:
        return SettingsField().write(redact(row.addresses))
