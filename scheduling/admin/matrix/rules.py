"""Pages of the delay rule, the anti-harassment rules and event types."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.decorators import display

from scheduling.admin.base import CheckedForm, HistoryAdmin, OpsAdmin, make_readonly_display
from scheduling.admin.form_fields import LevelsField
from scheduling.admin.retirement import Retirable, RetiredFilter
from scheduling.configuration.validation import check_delay_rule, check_rule
from scheduling.models import DelayRule, EventType, HarassmentRule
from scheduling.monitoring.duration_text import describe_duration


class DelayRuleForm(CheckedForm):
    check = staticmethod(check_delay_rule)

    by_level = LevelsField(
        label=_("by level"), required=False, help_text=_("The delay for each customer level, like vip=1h, normal=2h.")
    )

    class Meta:
        model = DelayRule
        exclude = ("version",)
        help_texts: ClassVar[Any] = {
            "default": _("For every other level."),
            "active_within": _("Customers with activity within this time count as active."),
            "active_factor": _("Multiplies the delay of active customers; 0.6 turns 1 h into 36 min."),
        }


@admin.register(DelayRule)
class DelayRuleAdmin(HistoryAdmin, OpsAdmin):
    """The single delay rule. Its list redirects to it."""

    form = DelayRuleForm
    fields = ("by_level", "default", ("active_within", "active_factor"), "version", "change_reason")
    readonly_fields = ("version",)
    write_only = frozenset({"change_reason"})
    shown_as: ClassVar[dict[str, str]] = {
        "by_level": "by_level_text", "default": "default_text", "active_within": "active_within_text",
    }  # fmt: skip
    by_level_text = make_readonly_display("by_level", _("by level"), LevelsField().write)
    default_text = make_readonly_display("default", _("otherwise"), describe_duration)
    active_within_text = make_readonly_display("active_within", _("active within"), describe_duration)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super().has_add_permission(request) and not DelayRule.objects.exists()

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: DelayRule, form: Any, change: bool) -> None:
        obj.pk = 1
        super().save_model(request, obj, form, change)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        row = DelayRule.objects.first()
        if row is not None and self.has_view_or_change_permission(request, row):
            return redirect(self.url("change", row.pk))
        page: HttpResponse = super().changelist_view(request, extra_context)
        return page


class HarassmentRuleForm(CheckedForm):
    check = staticmethod(check_rule)

    class Meta:
        model = HarassmentRule
        exclude = ("version",)
        help_texts: ClassVar[Any] = {
            "limit": _("Maximum number of messages within the window. Only for a cap."),
            "window": _("A rolling window, like 24h or 72h. For a cap and for the same content."),
            "quiet_from": _("Only for quiet hours; they may pass midnight."),
            "timezone": _("Used where the customer has none of their own."),
        }


@admin.register(HarassmentRule)
class HarassmentRuleAdmin(HistoryAdmin, Retirable):
    form = HarassmentRuleForm
    list_display = ("summary", "kind", "scope", "enabled", "version")
    list_filter = (RetiredFilter,)
    list_filter_submit = False
    fieldsets = (
        (None, {"fields": (("kind", "scope"), "enabled")}),
        (_("How often"), {"fields": (("limit", "window"),)}),
        (_("Quiet hours"), {"fields": (("quiet_from", "quiet_to"), "timezone")}),
        (_("Life"), {"fields": ("version", "change_reason")}),
    )
    readonly_fields = ("version",)
    write_only = frozenset({"change_reason"})
    shown_as: ClassVar[dict[str, str]] = {"window": "window_text"}
    window_text = make_readonly_display("window", _("window"), describe_duration)

    def in_use(self, row: HarassmentRule) -> bool:
        """Always in use: verdicts refer to a rule by its version."""
        return True

    @display(description=_("rule"))  # type: ignore[untyped-decorator]
    def summary(self, row: HarassmentRule) -> str:
        span, whom = describe_duration(row.window), row.get_scope_display()
        texts = {
            "cap": gettext("At most %(limit)s in %(span)s (%(whom)s)"),
            "dedupe": gettext("The same content not again within %(span)s"),
            "conversation": gettext("Not into a new conversation"),
            "quiet_hours": gettext("Quiet from %(begin)s to %(end)s"),
        }
        figures = {"limit": row.limit, "span": span, "whom": whom, "begin": "–", "end": "–"}
        if row.quiet_from and row.quiet_to:
            figures |= {"begin": f"{row.quiet_from:%H:%M}", "end": f"{row.quiet_to:%H:%M}"}
        return texts.get(row.kind, row.kind) % figures


@admin.register(EventType)
class EventTypeAdmin(OpsAdmin):
    list_display = ("key", "name", "is_activity", "created_at")
    search_fields = ("key", "name")
    fields = ("key", "name", "is_activity")

    def get_readonly_fields(self, request: HttpRequest, obj: EventType | None = None) -> Any:
        return ["key"] if obj else []
