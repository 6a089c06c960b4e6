"""Pages of customers and of their complaints."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.crypto import salted_hmac
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.timezone import now
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import DropdownFilter, RelatedDropdownFilter
from unfold.widgets import UnfoldAdminTextInputWidget, UnfoldBooleanSwitchWidget

from scheduling import sql
from scheduling.admin.base import (
    BigTable,
    CheckedForm,
    Confirmation,
    OpsAdmin,
    ReadOnlyAdmin,
    ops_display,
    row_action,
    table_page,
)
from scheduling.admin.dashboard.charts import read_requested_days
from scheduling.admin.form_fields import NamesField, SettingsField, TextLikeField
from scheduling.admin.labels import translate_reason
from scheduling.admin.page_reads import count_within, read_for_page
from scheduling.admin.shown_values import find_address, format_instant, render_link
from scheduling.admin.touches.timeline import describe_counted_kinds, format_verdict_figure, list_disabled_addresses
from scheduling.admin.touches.touch import STATE_TONES
from scheduling.customers.changes import CustomerInput, CustomersRefused, change_customer, match_term, predict_changes
from scheduling.customers.inputs import CustomerFields
from scheduling.error_text import ErrorText
from scheduling.errors import InvalidInput
from scheduling.models import (
    WAITING,
    Complaint,
    Customer,
    CustomerChange,
    CustomerProfile,
    DisabledTarget,
    Event,
    Touch,
)
from scheduling.monitoring.duration_text import describe_duration
from scheduling.operations import preview, queries
from scheduling.operations.preview import Eligibility, NodeVerdict
from scheduling.redaction import redact

PERIODS = (7, 30, 90)  #: days
USUAL = 30


@admin.register(Complaint)
class ComplaintAdmin(BigTable, ReadOnlyAdmin):
    list_display = ("complained_at", "who", "about", "node")
    list_select_related = ("customer", "touch__node")
    ordering = ("-pk",)
    list_filter = (("touch__node", RelatedDropdownFilter),)
    fields = readonly_fields = ("complained_at", "who", "about", "node")
    list_before_template = "ops/complaints_above.html"

    @ops_display(description=_("customer"))
    def who(self, row: Complaint) -> str:
        return render_link(find_address(row.customer), row.customer)

    @ops_display(description=_("touch"))
    def about(self, row: Complaint) -> str:
        return render_link(find_address(row.touch), f"…{str(row.touch.pk)[-8:]}") if row.touch else "–"

    @ops_display(description=_("node"))
    def node(self, row: Complaint) -> str:
        return row.touch.node.key if row.touch else "–"

    @table_page("rates/", "view")
    def rates(self, request: HttpRequest) -> HttpResponse:
        """Show complaint rates. A separate page, because it reads all delivered touches of the period."""
        days = read_requested_days(request, PERIODS, USUAL)
        since = now() - timedelta(days=days)
        found = read_for_page(
            request,
            lambda: count_within(lambda: queries.complaint_rates(since), settings.TIMEOUTS.complaint_rates),
        )
        titles = {
            "node": (gettext("By node"), gettext("node")),
            "template": (gettext("By template version"), gettext("template")),
            "community": (gettext("By community"), gettext("community")),
        }
        tables = None if found is None else [(*titles[noun], rates) for noun, rates in found.items()]
        return self.page(
            request,
            "ops/complaint_rates.html",
            gettext("Complaint rates"),
            tables=tables,
            most=queries.MOST_RATES,
            periods=[(each, describe_duration(timedelta(days=each)), each == days) for each in PERIODS],
            back=self.url("changelist"),
        )


SHOWN = 30  #: rows of each kind
SEARCHED_TAGS = 1_000  #: latest profiles whose tags the filter offers


def build_customer_context(request: HttpRequest, customer: Customer) -> dict[str, Any]:
    """Return what a customer's page shows beyond the form, limited to the user's rights."""
    may = request.user.has_perm
    changes = CustomerChange.objects.filter(customer=customer).order_by("-pk")[:SHOWN]
    context: dict[str, Any] = {
        "disabled_addresses": list_disabled_addresses(customer),
        "changes": [{"row": row, "fields": _describe_change(row)} for row in changes],
    }
    search = urlencode({"q": customer.user_id})
    if may("scheduling.view_touch"):
        touches = Touch.objects.select_related("node", "event")
        upcoming = touches.filter(customer=customer, state__in=WAITING).order_by("due_at")
        past = touches.filter(event__customer=customer).exclude(state__in=WAITING).order_by("-task_id")
        context |= {
            "upcoming": _describe_touches(upcoming),
            "past": _describe_touches(past),
            "touches_link": f"{reverse('admin:scheduling_touch_changelist')}?{search}",
            "eligibility": _describe_eligibility(preview.check_eligibility(customer.spec(), now())),
        }
    if may("scheduling.view_event"):
        context |= {
            "events": list(Event.objects.filter(customer=customer).order_by("-pk")[:SHOWN]),
            "events_link": f"{reverse('admin:scheduling_event_changelist')}?{search}",
        }
    if may("scheduling.view_complaint"):
        found = Complaint.objects.filter(customer=customer).select_related("touch__node").order_by("-pk")
        context["complaints"] = list(found[:SHOWN])
    return context


def _describe_change(row: CustomerChange) -> list[tuple[str, str, str]]:
    """Return field, old and new value of each changed field and attribute."""
    found = []
    for name in sorted(row.after):
        old, new = row.before.get(name), row.after[name]
        pairs = [(name, old, new)]
        if name == "attributes":
            pairs = [(key, old.get(key), new[key]) for key in sorted(new)]
        found += [(key, _format_changed(before), _format_changed(after)) for key, before, after in pairs]
    return found


def _format_changed(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return SettingsField().write(redact(value))
    return "" if value is None else str(value)


def _describe_eligibility(found: Eligibility) -> dict[str, Any]:
    return {
        "open": found.is_open,
        "at": found.opens_at,
        "wait": describe_duration(found.opens_at - now()) if found.opens_at and found.opens_at > now() else "",
        "usages": [
            gettext("%(taken)s of %(limit)s in %(span)s")
            % {"taken": usage.taken, "limit": usage.limit, "span": describe_duration(usage.rule.window)}
            + describe_counted_kinds(usage.rule.kinds)
            for usage in found.usages
        ],
        "nodes": [_describe_node_verdict(each) for each in found.answers],
    }


def _describe_node_verdict(each: NodeVerdict) -> dict[str, Any]:
    verdict = each.verdict
    tones = {"send": ("success", gettext("May be sent")), "hold": ("warning", gettext("Would wait")),
             "suppress": ("danger", gettext("Would not be sent"))}  # fmt: skip
    tone, words = tones[verdict.decision]
    return {
        "node": each.node, "tone": tone, "words": words, "reads_event": each.reads_event,
        "why": translate_reason(verdict.rule) if verdict.rule else "", "figures": _format_verdict_figures(verdict),
        "again": verdict.next_eligible_at,
    }  # fmt: skip


def _describe_touches(rows: QuerySet[Touch]) -> list[dict[str, Any]]:
    found = []
    for row in rows[:SHOWN]:
        # The latest verdict with this reason explains why the touch waits or was not sent.
        last = next((each for each in reversed(row.verdicts) if each.rule and each.rule == row.reason), None)
        found.append({
            "row": row, "why": translate_reason("paused" if row.paused_by else row.reason),
            "tone": STATE_TONES[row.state], "figures": _format_verdict_figures(last) if last else "",
            "again": last.next_eligible_at if last else None,
        })  # fmt: skip
    return found


def _format_verdict_figures(verdict: Any) -> str:
    """Format the observed value and the limit of a verdict."""
    shown = (verdict.observed, verdict.limit)
    return format_html_join(" / ", "{}", ((format_verdict_figure(each),) for each in shown if each))


class CustomerTagFilter(DropdownFilter):  # type: ignore[misc]
    """Offer the tags of the latest customers, and the one selected by a link."""

    title = _("tag")
    parameter_name = "tag"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        latest = CustomerProfile.objects.exclude(tags=[]).order_by("-pk").values_list("tags", flat=True)[:SEARCHED_TAGS]
        found = {tag for tags in latest for tag in tags} | {request.GET.get("tag", "")}
        return [(tag, tag) for tag in sorted(found) if tag]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Customer]) -> QuerySet[Customer]:
        return queryset.filter(profile__tags__contains=[self.value()]) if self.value() else queryset


class AddressesField(TextLikeField):
    """One `kind: address` a line. An address is a text, also if it looks like a number or is in quotes, as in YAML."""

    rows = 4

    def write(self, value: Mapping[str, str]) -> str:
        lines = [(kind, f'"{address}"' if _is_quoted(str(address)) else address) for kind, address in value.items()]
        return "\n".join(f"{kind}: {address}" for kind, address in sorted(lines))

    def to_python(self, value: Any) -> Any:
        found: dict[str, str] = {}
        for line in filter(str.strip, (super().to_python(value) or "").splitlines()):
            kind, colon, address = (part.strip() for part in line.partition(":"))
            if not colon:
                raise forms.ValidationError(_("Write one “name: value” a line."))
            if kind in found:
                raise forms.ValidationError(_("“%(name)s” is there twice") % {"name": kind})
            found[kind] = address[1:-1] if _is_quoted(address) else address
        return found


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\""


#: Fields that the API has too, without the opt-out, which `read_opt_out` reads.
CHECKED = ("name", "level", "locale", "timezone", "addresses", "attributes", "tags")


class CustomerForm(CheckedForm):
    written_columns = ("objected_at",)

    addresses = AddressesField(
        label=_("addresses"), help_text=_("One a line: “email: ann@example.com”, “phone: 13800138000”.")
    )

    attributes = SettingsField(
        label=_("attributes"),
        help_text=_("One a line: “city: Shanghai”, “paid: 520.5”, “member: true”, “since: 2026-03-03T12:00:00Z”."),
    )
    tags = NamesField(label=_("tags"), help_text=_("One a line, or separated by commas."))
    objection = forms.BooleanField(
        label=_("the customer asked for it in person"), required=False, widget=UnfoldBooleanSwitchWidget,
        help_text=_("Only a later consent allows marketing again, no update by another system."),
    )  # fmt: skip
    consent_source = forms.CharField(
        label=_("where the consent was given"), required=False, max_length=200, widget=UnfoldAdminTextInputWidget,
        help_text=_("Needed to allow marketing again to a customer who opted out in person."),
    )  # fmt: skip

    class Meta:
        model = Customer
        fields: ClassVar[Any] = ("user_id", "name", "level", "locale", "timezone", "addresses", "opted_out")
        help_texts: ClassVar[Any] = {
            "level": _("For example vip or normal. The delay rule uses the level."),
            "opted_out": _("Suppresses marketing content. Service content is still sent."),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in self._stored_profile().items():
            self.initial.setdefault(name, value)
        self.initial.setdefault("objection", bool(self.instance.objected_at))

    def _stored_profile(self) -> dict[str, Any]:
        row = CustomerProfile.objects.filter(pk=self.instance.pk).first() if self.instance.pk else None
        return {"attributes": row.attributes, "tags": row.tags} if row else {"attributes": {}, "tags": []}

    def _compute_version(self) -> str:
        """Include the profile, which is stored in a row of its own."""
        version = super()._compute_version()
        return version and salted_hmac(version, repr(self._stored_profile())).hexdigest()

    def clean_consent_source(self) -> str:
        source: str = self.cleaned_data["consent_source"]
        allows = not self.cleaned_data.get("opted_out", self.instance.opted_out)
        if source and not allows:
            raise forms.ValidationError(_("A consent allows marketing: remove the tick of the opt-out."))
        if self.instance.objected_at and allows and not source:
            raise forms.ValidationError(_("Enter where the customer has agreed since, for example “call of 3 March”."))
        return source

    def read_opt_out(self) -> dict[str, Any]:
        """Return the person's decision as `CustomerInput` has it."""
        source = self.cleaned_data["consent_source"]
        if self.cleaned_data["opted_out"]:
            objects = "opted_out" in self.changed_data or (
                "objection" in self.changed_data and self.cleaned_data["objection"]
            )
            return {"objection": True} if objects else {}
        if source:
            return {"opted_out": False, "consent": {"given_at": sql.now(), "source": source}}
        return {"opted_out": False} if "opted_out" in self.changed_data else {}

    def check(self, values: Mapping[str, Any], /) -> None:
        """Check what the user edited as the API does. An address or attribute that the form leaves out is removed.

        What is stored may be older than a rule. It stops no other edit, and its name is no reason to keep it.
        """
        edited = CHECKED if self.instance._state.adding else self.changed_data
        given = {name: values[name] for name in CHECKED if name in values and name in edited}
        empty = [name for name, value in given.get("attributes", {}).items() if value is None]  # the API removes these
        if empty:
            raise InvalidInput.of(f"attributes.{empty[0]}", ErrorText(gettext_noop("is missing")))
        self.changes = CustomerFields.read(given).list_given()
        stored = {"addresses": self.instance.addresses, "attributes": self._stored_profile()["attributes"]}
        for name in stored.keys() & self.changes.keys():
            self.changes[name] = {**dict.fromkeys(stored[name]), **self.changes[name]}
        numbers = {kind: str(each) for kind, each in self.instance.addresses.items() if isinstance(each, int)}
        if numbers and "addresses" not in self.changes:  # once written without quotes; as a text it looks the same
            self.changes["addresses"] = numbers
        try:
            predict_changes([CustomerInput(self.instance.user_id, self.changes)])
        except CustomersRefused as error:
            raise InvalidInput(*error.by_position.values()) from None


@admin.register(Customer)
class CustomerAdmin(BigTable, OpsAdmin):
    form = CustomerForm
    list_display = ("user_id", "name", "level", "tags_text", "locale", "consent", "last_active_at")
    list_select_related = ("profile",)
    list_filter = ("opted_out", CustomerTagFilter)  # the choices of the level would be read from the whole table
    ordering = ("-pk",)
    search_fields = ("user_id",)
    search_help_text = _("Part of the name, or start of the user id")
    readonly_fields = (
        "opted_out_at", "objected_at", "consent_text", "last_active_at", "conversation_at", "created_at",
        "masked_addresses",
    )  # fmt: skip
    fixed_fields = ("user_id",)
    write_only = frozenset({"consent_source", "objection"})
    change_form_outer_before_template = "ops/customer_now.html"
    change_form_outer_after_template = "ops/customer_touches.html"
    list_filter_submit = False
    actions_detail = ("enable_addresses",)
    forbidden = frozenset({"delete"})  # touches of a customer stay readable

    def layout(self, request: HttpRequest, obj: Customer | None) -> list[Any]:
        edits = obj is None or self.has_change_permission(request, obj)
        addresses = "addresses" if edits else "masked_addresses"
        consent = (("opted_out", "objection"), "consent_source", ("opted_out_at", "objected_at"), "consent_text")
        return [
            (None, {"fields": (("user_id", "name"), "level", ("locale", "timezone"), addresses)}),
            (_("Profile"), {"fields": ("attributes", "tags")}),
            (_("Consent"), {"fields": consent}),
            (_("Behaviour"), {"fields": ("last_active_at", "conversation_at", "created_at")}),
        ]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Customer], search_term: str
    ) -> tuple[QuerySet[Customer], bool]:
        return match_term(queryset, search_term), False

    def save_model(self, request: HttpRequest, obj: Customer, form: Any, change: bool) -> None:
        stored = change_customer(obj.user_id, form.changes | form.read_opt_out(), actor=request.user.get_username())
        obj.pk = stored.id
        if stored.ignored:
            text = gettext("The opt-out stays: the customer opted out after this consent. Reload the page.")
            self.message_user(request, text, messages.WARNING)

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        row = self.get_object(request, unquote(object_id))
        context = build_customer_context(request, row) if row else {}
        return super().change_view(request, object_id, form_url, {**context, **(extra_context or {})})

    @row_action(
        _("Enable addresses again"), icon="mark_email_read", permission="change", allowed=list_disabled_addresses
    )
    def enable_addresses(self, request: HttpRequest, row: Customer) -> Confirmation:
        found = list_disabled_addresses(row)
        facts = [f"{each.address_name} · {each.channel}" for each in found]  # type: ignore[attr-defined]
        return Confirmation(
            title=gettext("Enable disabled addresses of “%(who)s”?") % {"who": row}, button=gettext("Enable"),
            text=gettext(
                "Touches are sent to these addresses again. The next permanent bounce disables them again."
            ),
            facts=facts, act=lambda: DisabledTarget.objects.filter(pk__in=[each.pk for each in found]).delete(),
            logged=gettext("Enabled again: %(addresses)s.") % {"addresses": "; ".join(facts)},
        )  # fmt: skip

    @ops_display(description=_("marketing"), label={"opted_out": "danger", "allowed": "success"})
    def consent(self, row: Customer) -> tuple[str, Any]:
        return ("opted_out", _("Opted out")) if row.opted_out else ("allowed", _("Allowed"))

    @ops_display(description=_("latest consent"))
    def consent_text(self, row: Customer) -> str:
        given = row.consent
        if not given:
            return ""
        return format_html("{} · {}", given["source"], format_instant(datetime.fromisoformat(given["given_at"])))

    @ops_display(description=_("addresses"))
    def masked_addresses(self, row: Customer) -> str:
        return AddressesField().write(redact(row.addresses))

    @ops_display(description=_("tags"))
    def tags_text(self, row: Customer) -> str:
        profile = getattr(row, "profile", None)
        return ", ".join(profile.tags) if profile else ""
