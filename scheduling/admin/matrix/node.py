"""Pages of nodes, with a live preview of what an edit changes for waiting touches."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST
from unfold.contrib.filters.admin import RelatedDropdownFilter
from unfold.decorators import action, display
from unfold.widgets import UnfoldBooleanSwitchWidget

from scheduling.admin.base import CheckedForm, HistoryAdmin, make_readonly_display
from scheduling.admin.experiments import conversion
from scheduling.admin.experiments.rollout import (
    MOVED_BY_ROLLOUT,
    ROLLOUT_FIELDS,
    build_node_context,
    has_running_rollout,
)
from scheduling.admin.form_fields import DelayRulesField, DurationField, NamesField, SuggestingInput, list_event_types
from scheduling.admin.matrix import grid
from scheduling.admin.matrix.node_impact import impact_view, move_after_commit
from scheduling.admin.retirement import Retirable, RetiredFilter
from scheduling.admin.touches.pause import redirect_to_pause_page
from scheduling.configuration.validation import check_node
from scheduling.models import WAITING, Node, Pause, Touch
from scheduling.monitoring.duration_text import describe_duration


class NodeForm(CheckedForm):
    check = staticmethod(check_node)

    delay = DurationField(label=_("delay"), help_text=_("How long after the event, like 15m, 2h or 7d."))
    delay_rules = DelayRulesField(
        label=_("own delay rules"),
        required=False,
        help_text=_(
            "Only for a dynamic delay, and only where this node departs from the delay rule: "
            "vip=1h, normal=2h, default=24h, active_within=24h, factor=0.6"
        ),
    )
    rollout_communities = NamesField(
        label=_("rollout, always these communities"), help_text=_("Chat ids, one a line or separated by commas.")
    )
    canary_communities = NamesField(
        label=_("canary, always these communities"), help_text=_("Chat ids, one a line or separated by commas.")
    )
    cancel_on = NamesField(
        label=_("cancelled by these events"),
        help_text=_("Event types that cancel a waiting touch, for example order.paid; one per line."),
    )

    move_waiting = forms.BooleanField(
        label=_("move waiting touches"),
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text=_("Moves them to the time of the edited delay. Overdue touches are sent over ten minutes."),
    )

    def values(self) -> dict[str, Any]:
        return {name: value for name, value in super().values().items() if name != "move_waiting"}

    class Meta:
        model = Node
        exclude = ("version", "canary_guard")
        widgets: ClassVar[Any] = {
            "trigger": SuggestingInput(list_event_types),
            "goal_event": SuggestingInput(list_event_types),
        }
        help_texts: ClassVar[Any] = {
            "dynamic": _("The delay follows the customer's level and activity instead of the span above."),
            "rollout_percent": _("100: all communities. Below 100: this share, always the same communities."),
            "holdout_percent": _("Share of customers who never receive the touch, to measure its effect."),
            "canary_percent": _("The share of communities that gets the canary template instead."),
            "expires_after": _("Touches not sent within this time expire. For example 3d."),
            "goal_event": _("Event that the touch aims at, for example order.paid."),
            "over_cap": _("What happens when the customer's limit is reached."),
        }


class StateFilter(admin.SimpleListFilter):
    title = _("enabled")
    parameter_name = "enabled"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("1", _("Enabled")), ("0", _("Switched off"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Node]) -> QuerySet[Node]:
        return queryset.filter(enabled=self.value() == "1") if self.value() else queryset


@admin.register(Node)
class NodeAdmin(HistoryAdmin, Retirable):
    form = NodeForm
    list_display = ("key", "stage", "trigger", "wait", "template", "channel", "priority", "shown_state", "waiting")
    list_filter = (
        ("stage", RelatedDropdownFilter), ("channel", RelatedDropdownFilter), StateFilter, RetiredFilter,
    )  # fmt: skip
    list_select_related = ("stage", "template", "channel")
    search_fields = ("key", "trigger", "template__content_type")
    actions_list = ("open_matrix",)
    actions_detail = ("open_waiting", "pause_or_resume", "retire", "bring_back")
    readonly_fields = ("waiting", "version")
    write_only = frozenset({"change_reason", "move_waiting"})
    change_form_outer_after_template = "ops/node_after.html"
    fieldsets = (
        (
            _("When"),
            {
                "fields": (
                    "stage",
                    "trigger",
                    ("delay", "dynamic"),
                    "delay_rules",
                    "move_waiting",
                    "expires_after",
                    "cancel_on",
                )
            },
        ),
        (_("What"), {"fields": (("template", "channel"), "priority")}),
        (_("For whom"), {"fields": ("rollout_percent", "rollout_communities", "holdout_percent")}),
        (_("Canary"), {"fields": ("canary_template", "canary_percent", "canary_communities")}),
        (
            _("Guards"),
            {
                "fields": (
                    ("guard_cap", "over_cap"),
                    ("guard_dedupe", "guard_conversation"),
                    "guard_quiet_hours",
                    "on_repeat",
                )
            },
        ),
        (_("Goal"), {"fields": (("goal_event", "goal_within"),)}),
        (_("Life"), {"fields": ("key", "enabled", "waiting", "version", "change_reason")}),
    )
    shown_as: ClassVar[dict[str, str]] = {
        "delay": "delay_text", "delay_rules": "delay_rules_text", "expires_after": "expires_after_text",
        "goal_within": "goal_within_text", "cancel_on": "cancel_on_text",
        "rollout_communities": "rollout_communities_text", "canary_communities": "canary_communities_text",
        "rollout_percent": "rollout_percent_text", "canary_percent": "canary_percent_text",
        "holdout_percent": "holdout_percent_text",
    }  # fmt: skip
    rollout_percent_text = make_readonly_display("rollout_percent", _("rollout, percent of communities"), "{:g}".format)
    canary_percent_text = make_readonly_display("canary_percent", _("canary, percent of communities"), "{:g}".format)
    holdout_percent_text = make_readonly_display("holdout_percent", _("hold-out, percent of customers"), "{:g}".format)
    delay_text = make_readonly_display("delay", _("delay"), describe_duration)
    delay_rules_text = make_readonly_display("delay_rules", _("own delay rules"), DelayRulesField().write)
    expires_after_text = make_readonly_display("expires_after", _("expires after"), describe_duration)
    goal_within_text = make_readonly_display("goal_within", _("goal within"), describe_duration)
    cancel_on_text = make_readonly_display("cancel_on", _("cancelled by these events"), ", ".join)
    rollout_communities_text = make_readonly_display(
        "rollout_communities", _("rollout, always these communities"), ", ".join
    )
    canary_communities_text = make_readonly_display(
        "canary_communities", _("canary, always these communities"), ", ".join
    )

    class Media:
        css: ClassVar[Any] = {"all": ("scheduling/impact.css",)}
        js = ("scheduling/impact.js",)

    def get_urls(self) -> list[URLPattern]:
        page = self.admin_site.admin_view(lambda request: grid.matrix_page(self, request))
        effects = self.admin_site.admin_view(lambda request: conversion.effect_page(self, request))
        impact = self.admin_site.admin_view(lambda request, object_id: impact_view(self, request, object_id))
        return [
            path("matrix/", page, name="scheduling_node_matrix"),
            path("conversion/", effects, name="scheduling_node_conversion"),
            path("<path:object_id>/impact/", require_POST(impact), name="scheduling_node_impact"),
            *super().get_urls(),
        ]

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        node = self.get_object(request, unquote(object_id))
        context = (
            build_node_context(request, node) if node and self.has_view_or_change_permission(request, node) else {}
        )
        return super().change_view(request, object_id, form_url, {**context, **(extra_context or {})})

    def layout(self, request: HttpRequest, obj: Any) -> list[Any] | None:
        """Omit `move_waiting` for a new node, and make the canary read-only while an automatic roll-out moves it."""
        layout: list[Any] = list(self.fieldsets)
        (when, options), *rest = layout
        fields = tuple(each for each in options["fields"] if obj is not None or each != "move_waiting")
        if obj is not None and has_running_rollout(obj):
            rest = [
                (name, {"fields": self._for_viewers(each["fields"]), "description": MOVED_BY_ROLLOUT})
                if "canary_percent" in each["fields"] else (name, each) for name, each in rest
            ]  # fmt: skip
        return [(when, {"fields": fields}), *rest]

    def save_model(self, request: HttpRequest, obj: Node, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        if change and form.cleaned_data.get("move_waiting"):
            move_after_commit(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Node | None = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        if obj is not None and has_running_rollout(obj):
            fields = [*fields, *ROLLOUT_FIELDS]
        return [*fields, "key"] if obj else fields

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Offer rows that are not retired, and rows that nodes already use."""
        field = super().formfield_for_foreignkey(db_field, request, **kwargs)
        if field is not None and hasattr(db_field.related_model, "retired_at"):
            present = Node.objects.values_list(db_field.attname, flat=True).filter(retired_at=None)
            alive = db_field.related_model._default_manager
            field.queryset = alive.filter(retired_at=None) | alive.filter(pk__in=present)
        return field

    def in_use(self, row: Node) -> bool:
        return row.touches.exists()

    @display(description=_("delay"), ordering="delay")  # type: ignore[untyped-decorator]
    def wait(self, row: Node) -> str:
        return grid.format_node_delay(row)

    @display(  # type: ignore[untyped-decorator]
        description=_("state"),
        label={"on": "success", "off": "default", "paused": "warning", "retired": "default"},
    )
    def shown_state(self, row: Node) -> tuple[str, Any]:
        return grid.describe_node_state(row, _is_node_paused(row))

    @display(description=_("waiting touches"))  # type: ignore[untyped-decorator]
    def waiting(self, row: Node) -> str:
        """Count waiting touches up to 1,000; the node may have millions."""
        if row._state.adding:
            return "0"
        count = Touch.objects.filter(node=row, state__in=WAITING)[:1001].count()
        link = f"{_build_touches_link(row)}&state__in=scheduled,queued"
        return format_html('<a class="at-link" href="{}">{}</a>', link, "1000+" if count > 1000 else count)

    @action(description=_("Matrix"), icon="grid_view", url_path="open-matrix")  # type: ignore[untyped-decorator]
    def open_matrix(self, request: HttpRequest) -> HttpResponse:
        return redirect("admin:scheduling_node_matrix")

    @action(description=_("Touches"), icon="send", url_path="touches")  # type: ignore[untyped-decorator]
    def open_waiting(self, request: HttpRequest, object_id: str) -> HttpResponse:
        return redirect(_build_touches_link(self.get_row_or_404(request, object_id)))

    @action(description=_("Pause or resume"), icon="pause_circle", url_path="pause", permissions=["pause"])  # type: ignore[untyped-decorator]
    def pause_or_resume(self, request: HttpRequest, object_id: str) -> HttpResponse:
        return redirect_to_pause_page(f"node:{self.get_row_or_404(request, object_id).key}")

    def has_pause_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("scheduling.add_pause")


def _is_node_paused(row: Node) -> bool:
    scopes = ("all", f"channel:{row.channel.key}", f"node:{row.key}")
    return Pause.objects.filter(scope__in=scopes).exists()


def _build_touches_link(row: Node) -> str:
    return f"{reverse('admin:scheduling_touch_changelist')}?node__id__exact={row.pk}"
