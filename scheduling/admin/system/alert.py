"""Pages of alert receivers: channel, conditions and limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.timezone import now
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _
from unfold.admin import TabularInline
from unfold.decorators import action, display
from unfold.widgets import UnfoldAdminTextInputWidget, UnfoldBooleanSwitchWidget

from scheduling.admin.base import OpsAdmin, make_readonly_display
from scheduling.admin.form_fields import DurationField, NumberField
from scheduling.admin.labels import translate_reason
from scheduling.admin.matrix.community import list_known_communities
from scheduling.admin.matrix.template import describe_outcome
from scheduling.admin.optimistic_lock import OptimisticLockForm
from scheduling.channels.kinds import channel_kinds
from scheduling.delivery.routing import NoTarget
from scheduling.durations import format_duration, from_seconds, to_seconds
from scheduling.ids import new_id
from scheduling.models import Alert, AlertReceiver, ChannelConfig, Community
from scheduling.models.encrypted import Sealed, Unreadable
from scheduling.monitoring.alerting import messages
from scheduling.monitoring.alerting.conditions import Condition, Unit, get_default_limits, load_conditions
from scheduling.monitoring.duration_text import describe_duration

ELLIPSIS = {"what": "…"}


def list_alert_kinds() -> list[str]:
    """Return the channel kinds that reach people without a customer's chat or a shop."""
    return [
        key for key, kind in channel_kinds().items() if kind.secret_fields and kind.address_key in ("", "email")
    ]  # fmt: skip


def get_condition_title(condition: Condition) -> str:
    """Return a condition's title without its subject: `Messages wait too long in …`, `Failed tasks come in numbers`."""
    return re.sub(r"\s*[(（]…[)）]", "", str(condition.title) % ELLIPSIS)


def describe_condition(condition: Condition, limit: float) -> str:
    """Format a condition with its limit: `Touches are late: more than 60 s`."""
    if condition.unit == Unit.NONE:
        return get_condition_title(condition)
    words = describe_duration(from_seconds(limit)) if condition.unit == Unit.SPAN else f"{limit:g}"
    return gettext("%(title)s: more than %(limit)s") % {"title": get_condition_title(condition), "limit": words}


def make_condition_field(condition: Condition) -> forms.Field:
    label = get_condition_title(condition)
    if condition.unit == Unit.SPAN:
        return DurationField(label=label, required=False, help_text=_("Longer than this, like 90s, 2m or 1d."))
    if condition.unit == Unit.COUNT:
        return NumberField(
            label=label, required=False, min_value=0, widget=UnfoldAdminTextInputWidget, help_text=_("More than this.")
        )
    return forms.BooleanField(label=label, required=False, widget=UnfoldBooleanSwitchWidget)


class AlertReceiverForm(OptimisticLockForm):
    """Edit a receiver. Each condition has a field; an empty or disabled one sends no alert."""

    written_columns = ("limits",)

    class Meta:
        model = AlertReceiver
        exclude: ClassVar[Any] = ("limits",)
        help_texts: ClassVar[Any] = {
            "name": _("Who they are, like “on duty”."),
            "community": _("For robots of group chats: the chat whose robot is used."),
            "address": _("For e-mail."),
            "holds_for": _(
                "Shorter alerts are not notified. An alert is resolved after the same time without the condition."
            ),
            "remind_every": _("Reminder interval while the alert is active. Empty: one notification only."),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "channel" in self.fields:  # viewers have none
            usable = Q(kind__in=list_alert_kinds(), retired_at=None) | Q(pk=self.instance.channel_id)
            self.fields["channel"].queryset = ChannelConfig.objects.filter(usable)  # type: ignore[attr-defined]
            known = Q(pk__in=list_known_communities().values("pk")) | Q(pk=self.instance.community_id)
            self.fields["community"].queryset = Community.objects.filter(known)  # type: ignore[attr-defined]
        limits = self.instance.limits if self.instance.pk else get_default_limits()
        for key, condition in load_conditions().items():
            field = self.fields[f"limit_{key}"] = make_condition_field(condition)
            field.initial = _format_limit_value(condition, limits[key]) if key in limits else None

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        if not self.errors:
            row = AlertReceiver(**{name: cleaned[name] for name in ("channel", "community", "address")})
            try:
                messages.resolve_route(row)
            except NoTarget as error:
                self.add_error(_find_missing_field(row), translate_reason(error.reason))
            except Unreadable:
                pass  # unreadable on this server; another node may have the key
        return cleaned

    def _post_clean(self) -> None:
        super()._post_clean()  # type: ignore[misc]
        given = {key: self.cleaned_data.get(f"limit_{key}") for key in load_conditions()}
        self.instance.limits = {
            key: _parse_limit_value(load_conditions()[key], value)
            for key, value in given.items()
            if value not in (None, False, "")
        }


def _format_limit_value(condition: Condition, limit: float) -> Any:
    if condition.unit == Unit.NONE:
        return True
    return format_duration(from_seconds(limit)) if condition.unit == Unit.SPAN else limit


def _parse_limit_value(condition: Condition, value: Any) -> float:
    if condition.unit == Unit.NONE:
        return condition.limit
    return to_seconds(value) if condition.unit == Unit.SPAN else value


def _find_missing_field(row: AlertReceiver) -> str:
    kind = channel_kinds().get(row.channel.kind)
    return "address" if kind is not None and kind.address_key else "community"


def _has_unreadable_secrets(row: AlertReceiver) -> bool:
    return isinstance(row.channel.config, Sealed) or (
        row.community is not None and isinstance(row.community.targets, Sealed)
    )


class AlertInline(TabularInline):  # type: ignore[misc]
    model = Alert
    extra = 0
    hide_title = True
    fields = readonly_fields = ("wrong", "since", "notified_at", "absent_since")
    verbose_name_plural = _("Active alerts")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @display(description=_("what is wrong"))  # type: ignore[untyped-decorator]
    def wrong(self, row: Alert) -> str:
        condition = load_conditions().get(row.condition)
        return str(condition.title) % {"what": condition.name(row.subject)} if condition else row.condition


@admin.register(AlertReceiver)
class AlertReceiverAdmin(OpsAdmin):
    form = AlertReceiverForm
    inlines = (AlertInline,)
    list_display = ("name", "channel", "shown_state", "notified_at", "enabled")
    list_select_related = ("channel", "community")
    readonly_fields = ("limits_text", "notified_at", "shown_problem")
    actions_detail = ("send_test",)
    shown_as: ClassVar[Mapping[str, str]] = {"holds_for": "holds_for_text", "remind_every": "remind_every_text"}
    holds_for_text = make_readonly_display("holds_for", _("notify after"), describe_duration)
    remind_every_text = make_readonly_display("remind_every", _("repeat every"), describe_duration)

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        # The limits are fields of the form, not of the model; viewers get no form at all.
        kwargs["fields"] = None if obj is None or self.has_change_permission(request, obj) else []
        return super().get_form(request, obj, change, **kwargs)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        viewer = obj is not None and not self.has_change_permission(request, obj)
        limits = ["limits_text"] if viewer else [f"limit_{key}" for key in load_conditions()]
        recent = [(_("Recent alerts"), {"fields": ("notified_at", "shown_problem")})] if obj else []
        return [
            (None, {"fields": ("name", "enabled", "channel", "community", "address")}),
            (pgettext_lazy("alert", "When"), {"fields": (("holds_for", "remind_every"),)}),
            (_("Notified alerts"), {"fields": limits, "description": _("Empty or disabled alerts are not notified.")}),
            *recent,
        ]

    def save_model(self, request: HttpRequest, obj: AlertReceiver, form: Any, change: bool) -> None:
        """Save the row, except the lease of a concurrent pass.

        Resets the retry delay, so that unsent alerts are tried at once.
        """
        if not change:
            super().save_model(request, obj, form, change)
            return
        obj.tries, obj.retry_at, obj.problem = 0, None, ""
        kept = {"id", "lease_no", "watched_until", "notified_at"}
        obj.save(update_fields=[field.name for field in obj._meta.fields if field.name not in kept])

    def get_queryset(self, request: HttpRequest) -> QuerySet[AlertReceiver]:
        standing = Count("alerts", filter=Q(alerts__notified_at__isnull=False))
        return super().get_queryset(request).annotate(standing=standing)  # type: ignore[no-any-return]

    @display(description=_("state"), label={"well": "success", "alerts": "danger", "lost": "warning"})  # type: ignore[untyped-decorator]
    def shown_state(self, row: Any) -> tuple[str, str]:
        if row.problem:
            return "lost", gettext("Notification failed")
        if _has_unreadable_secrets(row):
            return "lost", gettext("Secrets cannot be decrypted here")
        if row.standing:
            return "alerts", gettext("Alerts: %(count)s") % {"count": row.standing}
        return "well", gettext("All is well")

    @display(description=_("problem"))  # type: ignore[untyped-decorator]
    def shown_problem(self, row: AlertReceiver) -> str:
        if not row.problem and _has_unreadable_secrets(row):
            return gettext("Secrets cannot be decrypted here")
        code, _space, detail = row.problem.partition(" ")
        return " – ".join(part for part in (translate_reason(code), detail) if part) if code else "–"

    @display(description=_("notified alerts"))  # type: ignore[untyped-decorator]
    def limits_text(self, row: AlertReceiver) -> str:
        limits = [
            describe_condition(each, row.limits[key]) for key, each in load_conditions().items() if key in row.limits
        ]
        return "; ".join(limits) or "–"

    @action(description=_("Send a test"), icon="send", url_path="send-test", permissions=["change"])  # type: ignore[untyped-decorator]
    def send_test(self, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.get_row_or_404(request, object_id)
        outcome: Any = None
        body = gettext(
            "This is a test message. Alerts of Aftertouch arrive here with problem, start time and severity."
        )
        if request.method == "POST":
            subject = gettext("[Test] Alerts")
            try:
                route = messages.resolve_route(row)
                outcome = messages.send_alert_message(route, subject, f"{subject}\n{body}", now(), new_id())
            except NoTarget as error:
                outcome = translate_reason(error.reason)
            except Unreadable:
                outcome = gettext("Secrets cannot be decrypted here")
            self.log_change(request, row, gettext("Sent a test."))
        return self.page(
            request, "ops/send_test.html", gettext("Send a test to “%(who)s”") % {"who": row}, form=forms.Form(),
            result=describe_outcome(outcome) if outcome is not None else None, body=body, original=row,
            back=self.url("change", row.pk),
        )  # fmt: skip
