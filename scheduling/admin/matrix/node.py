"""Pages of nodes: the form with its checks, and the actions on a node."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.utils import flatten, unquote
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import RelatedDropdownFilter
from unfold.widgets import UnfoldBooleanSwitchWidget

from scheduling import sql
from scheduling.admin import experiments
from scheduling.admin.base import (
    CheckedForm,
    Confirmation,
    HistoryAdmin,
    Retirable,
    RetiredFilter,
    ops_display,
    row_action,
    table_page,
)
from scheduling.admin.dashboard.charts import format_capped_count
from scheduling.admin.experiments import (
    MOVED_BY_ROLLOUT,
    ROLLOUT_FIELDS,
    build_node_context,
    confirm_start,
    confirm_stop,
    has_running_rollout,
    may_start_rollout,
)
from scheduling.admin.form_fields import (
    DelayRulesField,
    DurationField,
    NamesField,
    SuggestingInput,
    WindowsField,
    list_event_types,
)
from scheduling.admin.labels import translate_error
from scheduling.admin.matrix import grid
from scheduling.admin.matrix.conditions import ConditionField, VariantsField
from scheduling.admin.matrix.preview import move_after_commit, preview_node
from scheduling.admin.matrix.rules import add_calendar_errors, unfold_edits
from scheduling.admin.page_reads import count_within
from scheduling.admin.shown_values import render_link
from scheduling.admin.touches.pause import is_paused, load_paused_scopes, redirect_to_pause_page
from scheduling.admin.touches.timeline import build_receipt_figures
from scheduling.configuration.condition_fields import FieldCatalogue, conditions_in
from scheduling.error_text import ErrorText
from scheduling.models import Node
from scheduling.policy.matrix import TOUCH_TYPES, find_follow_problem
from scheduling.strict_text import storable_text

MOST_WAITING = 1_000  #: counted touches of a node

#: The first one is always unfolded; the last one shows nothing of a node's own.
SECTIONS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (_("Essentials"), (
        "name", ("stage", "trigger"), "delay", "move_waiting", ("template", "channel"), "enabled", "change_reason",
    )),
    (_("When"), (
        "from_nodes", "dynamic", "delay_rules", ("at", "at_day"), ("not_before", "send_window"), "expires_after",
        "cancel_on",
    )),
    (_("What"), ("priority", "variants", "tags")),
    (_("For whom"), ("when", "rollout_percent", "rollout_communities", ("holdout_percent", "guard_holdout"))),
    (_("Canary"), ("canary_template", "canary_percent", "canary_communities")),
    (_("Guards"), (
        ("guard_cap", "over_cap"), ("guard_dedupe", "guard_conversation"), "guard_quiet_hours", "on_repeat",
    )),
    (_("Goal"), (("goal_event", "goal_within"),)),
    (_("Life"), ("key", "waiting", "version")),
)  # fmt: skip


def build_sections(row: Node | None) -> list[Any]:
    """Return the fieldsets of a node, those without own values folded; without `move_waiting` for a new one."""
    essentials, *others, life = SECTIONS
    first = tuple(each for each in essentials[1] if row is not None or each != "move_waiting")
    return [
        (essentials[0], {"fields": first}),
        *(
            (title, {"fields": names, "classes": () if row and _has_own_values(row, names) else ("collapse",)})
            for title, names in others
        ),
        (life[0], {"fields": life[1], "classes": ("collapse",)}),
    ]


def _has_own_values(row: Node, names: Any) -> bool:
    """Return whether any of these columns differs from the default."""
    columns = [Node._meta.get_field(name) for name in flatten(names)]
    return any(getattr(row, column.attname) != column.get_default() for column in columns)  # type: ignore[union-attr]


_LOCK_JOURNEYS = "SELECT pg_advisory_xact_lock(hashtext('scheduling_node.from_nodes'))"


class NodeForm(CheckedForm):
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
    from_nodes = NamesField(
        label=_("follows these nodes"),
        help_text=_(
            "Only for a trigger about touches, like touch.delivered: the keys of the nodes whose touches it follows, "
            "one per line."
        ),
    )
    cancel_on = NamesField(
        label=_("cancelled by these events"),
        help_text=_("Event types that cancel a waiting touch, for example order.paid; one per line."),
    )

    when = ConditionField(
        label=_("conditions"),
        required=False,
        help_text=_(
            "A touch is planned and sent only if they hold. Fields: event.data.…, event.type, event.source, chat_id, "
            "customer.level, customer.locale, customer.tags, customer.attributes.…, customer.events.….count (earlier "
            "events in 90 days). Rows with the same letter form a group: among “all rows” one of them is enough, "
            "among “any row” all of them must hold. Clear a row to remove it; save for more rows."
        ),
    )
    variants = VariantsField(
        label=_("content variants"),
        required=False,
        help_text=_("The first variant whose conditions hold replaces the template, at most 10."),
    )
    tags = NamesField(label=_("tags"), help_text=_("A cap may count the messages of all nodes with a tag."))
    send_window = WindowsField(
        label=_("send windows"),
        blank_is_default=True,
        help_text=_(
            "One a line, like “working 09:00-18:00” or “mon-fri 10:00-20:00 calendar=china timezone=Asia/Shanghai”. "
            "Empty: those of the default calendar. “always”: at any time."
        ),
    )
    move_waiting = forms.BooleanField(
        label=_("move waiting touches"),
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text=_("Moves them to the time of the edited delay. Overdue touches are sent over ten minutes."),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.catalogue = FieldCatalogue()
        trigger = self["trigger"].value() if "trigger" in self.fields else ""
        for name in {"when", "variants"} & self.fields.keys():
            self.fields[name].widget.suggest = lambda: self.catalogue.suggest(storable_text(str(trigger or "")))
        if "variants" in self.fields:
            self.fields["variants"].kept = {(each["key"], each["template"]) for each in self.instance.variants}  # type: ignore[attr-defined]
        if "key" in self.fields:  # of a new node
            self.fields["key"].required = False

    def clean(self) -> dict[str, Any]:
        if self.cleaned_data.get("from_nodes") and connection.in_atomic_block:
            sql.execute(_LOCK_JOURNEYS, {})  # before the row's lock, so that two forms cannot deadlock
        self._derive_key()
        cleaned = super().clean()
        self._check_followed_nodes(cleaned)
        add_calendar_errors(self, cleaned.get("send_window"), set())
        if not {"when", "variants"} & self.errors.keys():
            stored = {"when": self.instance.when, "variants": self.instance.variants}
            unknown = self.catalogue.find_unknown(
                conditions_in(cleaned), str(cleaned.get("trigger", "")), conditions_in(stored)
            )
            for place, problem in unknown:
                self.add_error(place.partition(".")[0].partition("[")[0], translate_error(problem))
        return cleaned

    def _derive_key(self) -> None:
        """Set the key of a new node if the user typed none."""
        given = self.cleaned_data
        if "key" in self.fields and not given.get("key") and not {"key", "stage", "trigger"} & self.errors.keys():
            given["key"] = grid.derive_node_key(given.get("name", ""), given["stage"].key, given["trigger"])

    def _check_followed_nodes(self, cleaned: dict[str, Any]) -> None:
        """Add errors for unknown nodes, a cycle and a long chain. Of two concurrent saves the second one waits."""
        wanted = cleaned.get("from_nodes") or []
        if not wanted or cleaned.get("trigger") not in TOUCH_TYPES:  # the row's own rules report the trigger
            return
        key = str(cleaned.get("key") or self.instance.key)
        known = {row.key: row for row in Node.objects.only("key", "from_nodes", "retired_at")}
        lost = [
            each for each in wanted
            if each != key and (each not in known or known[each].retired_at) and each not in self.instance.from_nodes
        ]  # fmt: skip
        problems = [ErrorText(gettext_noop("there is no node “%(name)s”"), name=each) for each in lost]
        problem = find_follow_problem(
            key, wanted, {each.key: each.from_nodes for each in known.values()}, settings.AFTERTOUCH_JOURNEY_DEPTH
        )
        for each in [*problems, *([problem] if problem else [])]:
            self.add_error("from_nodes", translate_error(each))

    class Meta:
        model = Node
        exclude = ("version", "canary_guard")
        widgets: ClassVar[Any] = {
            "trigger": SuggestingInput(list_event_types),
            "goal_event": SuggestingInput(list_event_types),
        }
        help_texts: ClassVar[Any] = {
            "name": _("Shown in the matrix and in lists. Empty: the key."),
            "key": _("For the API and the configuration file; fixed once stored. Empty: derived from the name."),
            "dynamic": _("The delay follows the customer's level and activity instead of the span above."),
            "rollout_percent": _("100: all communities. Below 100: this share, always the same communities."),
            "at": _("Time of day in the customer's zone, after the delay. Empty: the delay alone decides."),
            "not_before": _("A touch due earlier on its day waits for this time."),
            "holdout_percent": _("Share of customers who never receive the touch, to measure its effect."),
            "guard_holdout": _("“Ignore” sends to the global hold-out too: for messages that customers need."),
            "canary_percent": _("The share of communities that gets the canary template instead."),
            "expires_after": _("Touches not sent within this time expire. For example 3d."),
            "goal_event": _("Event that the touch aims at, for example order.paid."),
            "over_cap": _("What happens when the customer's limit is reached."),
        }


@admin.register(Node)
class NodeAdmin(HistoryAdmin, Retirable):
    form = NodeForm
    list_display = (
        "name_or_key", "key", "stage", "trigger", "wait", "template", "channel", "priority",
        "shown_state", "waiting",
    )  # fmt: skip
    list_filter = (("stage", RelatedDropdownFilter), ("channel", RelatedDropdownFilter), "enabled", RetiredFilter)
    list_filter_submit = True
    list_select_related = ("stage", "template", "channel")
    search_fields = ("name", "key", "trigger", "template__content_type")
    actions_detail = (
        "open_waiting", "pause_or_resume", "retire", "bring_back", "start_rollout", "stop_rollout", "place", "copy",
        "preview",
    )  # fmt: skip
    readonly_fields = ("waiting", "version")
    fixed_fields = ("key",)
    write_only = frozenset({"change_reason", "move_waiting"})
    change_form_outer_after_template = "ops/node_after.html"

    class Media:
        js = ("scheduling/node_preview.js",)

    conversion = table_page("conversion/", "view", "scheduling.view_touch")(experiments.show_effects)
    matrix = table_page("matrix/", "view")(grid.matrix_page)

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        node = self.get_object(request, unquote(object_id))
        context: dict[str, Any] = {}
        if node and self.has_view_or_change_permission(request, node):
            context = {
                **build_node_context(node),
                "links": self.action_links(request, node),
                "receipt_figures": build_receipt_figures(node),
            }
        return super().change_view(request, object_id, form_url, {**context, **(extra_context or {})})

    def layout(self, request: HttpRequest, obj: Any) -> list[Any] | None:
        sections = build_sections(obj)
        if obj is not None and has_running_rollout(obj):
            for _title, options in sections:
                if "canary_percent" in options["fields"]:
                    options.update(classes=(), description=MOVED_BY_ROLLOUT)
        return sections

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        unfold_edits(context["adminform"])
        return super().render_change_form(request, context, *args, **kwargs)

    def response_post_save_add(self, request: HttpRequest, obj: Node) -> HttpResponse:
        return redirect(grid.build_card_link(self, obj))

    def response_post_save_change(self, request: HttpRequest, obj: Node) -> HttpResponse:
        return redirect(grid.build_card_link(self, obj))

    def save_model(self, request: HttpRequest, obj: Node, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        if change and form.cleaned_data.get("move_waiting"):
            move_after_commit(request, obj)

    def locked_fields(self, request: HttpRequest, obj: Node | None) -> Collection[str]:
        """Lock the canary while an automatic roll-out moves it."""
        return ROLLOUT_FIELDS if obj is not None and has_running_rollout(obj) else ()

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Offer rows that are not retired, and rows that nodes already use."""
        field = super().formfield_for_foreignkey(db_field, request, **kwargs)
        if field is not None and hasattr(db_field.related_model, "retired_at"):
            present = Node.objects.values_list(db_field.attname, flat=True).filter(retired_at=None)
            alive = db_field.related_model._default_manager
            field.queryset = alive.filter(retired_at=None) | alive.filter(pk__in=present)
        return field

    def in_use(self, row: Node) -> bool:
        return row.touches.exists() or bool(grid.list_followers(row))

    def describe_retirement_effects(self, row: Node) -> list[str]:
        waiting = grid.describe_waiting_touches(row)
        effect = gettext("They are suppressed when they fall due, unless the node is restored by then.")
        return [waiting, effect] if waiting else []

    @ops_display(description=_("delay"), ordering="delay")
    def wait(self, row: Node) -> str:
        return grid.format_node_delay(row)

    def load_rows(self, rows: Iterable[Any]) -> None:
        scopes, counts = load_paused_scopes(), _count_waiting(rows)
        for row in rows:
            row.paused_scopes, row.waiting_counts = scopes, counts

    @ops_display(
        description=_("state"),
        label={"on": "success", "off": "default", "paused": "warning", "retired": "default"},
    )
    def shown_state(self, row: Any) -> tuple[str, Any]:
        return grid.describe_node_state(row, is_paused(row.paused_scopes, row.channel.key, row.key))

    @ops_display(description=_("waiting touches"))
    def waiting(self, row: Node) -> str:
        if row._state.adding:
            return "0"
        counts = row.waiting_counts if hasattr(row, "waiting_counts") else _count_waiting([row])
        count = None if counts is None else counts[row.pk]
        link = f"{_build_touches_link(row)}&state__in=scheduled,queued"
        return render_link(link, format_capped_count(count, MOST_WAITING) or "–")

    @row_action(_("Touches"), icon="send", permission="view")
    def open_waiting(self, request: HttpRequest, row: Node) -> HttpResponse:
        return redirect(_build_touches_link(row))

    @row_action(_("Pause or resume"), icon="pause_circle", permission="scheduling.add_pause")
    def pause_or_resume(self, request: HttpRequest, row: Node) -> HttpResponse:
        return redirect_to_pause_page(f"node:{row.key}")

    @row_action(permission="change", allowed=may_start_rollout)
    def start_rollout(self, request: HttpRequest, row: Node) -> Confirmation:
        return confirm_start(request, row)

    @row_action(permission="change", allowed=has_running_rollout)
    def stop_rollout(self, request: HttpRequest, row: Node) -> Confirmation:
        return confirm_stop(request, row)

    @row_action(permission="change", methods=["POST"])
    def place(self, request: HttpRequest, row: Node) -> HttpResponse:
        return grid.place_card(self, request, row)

    @row_action(permission="scheduling.add_node", methods=["POST"])
    def copy(self, request: HttpRequest, row: Node) -> HttpResponse:
        return grid.copy_node(self, request, row)

    @row_action(permission="scheduling.view_event", methods=["GET", "HEAD"])
    def preview(self, request: HttpRequest, row: Node) -> HttpResponse:
        return preview_node(request, row)


_WAITING = """
SELECT node.id, (
    SELECT count(*) FROM (
        SELECT FROM scheduling_touch_live AS touch
        WHERE touch.node_id = node.id AND touch.state IN ('scheduled', 'queued') LIMIT %(most)s
    ) AS waiting
) FROM unnest(%(nodes)s::bigint[]) AS node (id)
"""


def _count_waiting(nodes: Iterable[Node]) -> dict[int, int] | None:
    """Count the waiting touches of each node, up to `MOST_WAITING` + 1; None if that takes too long."""
    given = {"nodes": [node.pk for node in nodes], "most": MOST_WAITING + 1}
    return count_within(lambda: dict(sql.rows(_WAITING, given)))


def _build_touches_link(row: Node) -> str:
    return f"{reverse('admin:scheduling_touch_changelist')}?node__id__exact={row.pk}"
