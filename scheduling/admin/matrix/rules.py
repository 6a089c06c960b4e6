"""Pages of the delay rule, the anti-harassment rules and event types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.utils import flatten
from django.http import HttpRequest, HttpResponse
from django.utils.formats import date_format
from django.utils.html import format_html_join
from django.utils.timezone import localdate
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from scheduling.admin.base import (
    CheckedForm,
    HistoryAdmin,
    OpsAdmin,
    Retirable,
    SingleRowAdmin,
    ops_display,
)
from scheduling.admin.form_fields import LevelsField, LimitsField, NamesField, SuggestingInput, WindowsField
from scheduling.admin.matrix.channel import channels_by_key
from scheduling.configuration.file.sections import list_users
from scheduling.configuration.validation import check_rule_channel
from scheduling.models import Calendar, DelayRule, EventType, HarassmentRule, Holdout, Node
from scheduling.monitoring.duration_text import describe_duration
from scheduling.policy.send_times import format_window, is_official_working_day, list_calendars


class DelayRuleForm(CheckedForm):
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
class DelayRuleAdmin(HistoryAdmin, SingleRowAdmin):
    form = DelayRuleForm
    fields = ("by_level", "default", ("active_within", "active_factor"), "version", "change_reason")
    readonly_fields = ("version",)


class CalendarForm(CheckedForm):
    closed = NamesField(
        label=_("own days off"), help_text=_("Days that the country works, one a line, like 2026-12-25.")
    )
    open = NamesField(
        label=_("own working days"), help_text=_("Days that the country does not work, one a line, like 2026-10-10.")
    )
    send_window = WindowsField(
        label=_("default send windows"),
        blank_is_default=False,
        help_text=_(
            "For nodes without own ones, and only of the first calendar. One a line, like “mon-fri 09:00-18:00” or "
            "“working 09:00-18:00”. Empty: at any time."
        ),
    )

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        own = {cleaned.get("key") or self.instance.key}
        add_calendar_errors(self, cleaned.get("send_window"), own)
        return cleaned

    class Meta:
        model = Calendar
        exclude = ("version",)
        help_texts: ClassVar[Any] = {
            "position": _("The calendar with the lowest number is the default: for windows that name none."),
            "timezone": _("Used where the customer has none of their own."),
            "country": _("A code like CN. Its public holidays, and the days worked instead, apply."),
        }


def add_calendar_errors(form: Any, windows: Any, known: set[str]) -> None:
    """Add an error for each window that names a calendar which is neither in use nor among `known`."""
    named = {key for _place, key in list_calendars(windows)} - known
    missing = named - set(Calendar.objects.filter(key__in=named, retired_at=None).values_list("key", flat=True))
    for key in sorted(missing):
        form.add_error("send_window", gettext("there is no calendar “%(name)s”") % {"name": key})


@admin.register(Calendar)
class CalendarAdmin(HistoryAdmin, Retirable):
    form = CalendarForm
    list_display = ("key", "country", "timezone", "windows_shown", "is_default", "version")
    fields = (
        ("key", "position"), ("timezone", "country"), "closed", "open", "send_window", "known_days", "version",
        "change_reason",
    )  # fmt: skip
    readonly_fields = ("known_days", "version")
    fixed_fields = ("key",)

    def in_use(self, row: Calendar) -> bool:
        return bool(list_users(row))

    def load_rows(self, rows: Iterable[Any]) -> None:
        first = Calendar.objects.filter(retired_at=None).first()
        for row in rows:
            row.is_first = row == first

    @ops_display(description=_("default send windows"))
    def windows_shown(self, row: Calendar) -> str:
        return "; ".join(map(format_window, row.send_window)) or "–"

    @ops_display(description=_("default"), boolean=True)
    def is_default(self, row: Any) -> bool:
        return bool(row.is_first)

    @ops_display(description=_("holidays and days worked instead, this year and next"))
    def known_days(self, row: Calendar) -> str:
        """List the working days at weekends and the free weekdays."""
        if not row.country:
            return "–"
        first = localdate().replace(month=1, day=1)
        days = [first + timedelta(days=offset) for offset in range(731)]
        moved = [each for each in days if is_official_working_day(each, row.country) != (each.weekday() < 5)]
        words = {True: gettext("working"), False: gettext("free")}
        return format_html_join(
            "", "<div>{} {}</div>", ((date_format(each, "Y-m-d D"), words[each.weekday() > 4]) for each in moved)
        )


class HoldoutForm(CheckedForm):
    class Meta:
        model = Holdout
        exclude = ("version",)
        help_texts: ClassVar[Any] = {
            "percent": _(
                "Share of customers that no node sends to. Nodes for messages that customers need leave it out."
            ),
            "key": _("Any text. Another text draws other customers, for example each year."),
        }


@admin.register(Holdout)
class HoldoutAdmin(HistoryAdmin, SingleRowAdmin):
    form = HoldoutForm
    fields = ("percent", "key", "version", "change_reason")
    readonly_fields = ("version",)


def _list_tags() -> list[tuple[str, str]]:
    lists = Node.objects.filter(retired_at=None).exclude(tags=[]).values_list("tags", flat=True)
    return [(tag, "") for tag in sorted({tag for tags in lists for tag in tags})]


class HarassmentRuleForm(CheckedForm):
    limits = LimitsField(
        label=_("limits by level"),
        required=False,
        help_text=_("For customers of these levels instead of the limit, like vip=5, normal=2."),
    )

    def check(self, values: Mapping[str, Any], /) -> None:
        check_rule_channel(values.get("channel", ""), channels_by_key())

    class Meta:
        model = HarassmentRule
        exclude = ("version",)
        help_texts: ClassVar[Any] = {
            "limit": _("Maximum number of messages within the window. Only for a cap."),
            "window": _("A rolling window, like 24h or 72h. For a cap and for the same content."),
            "quiet_from": _("Only for quiet hours; they may pass midnight."),
            "timezone": _("Used where the customer has none of their own."),
            "channel": _("Key or kind of a channel. Only its messages are counted and limited."),
            "tag": _("Only messages of nodes with this tag are counted and limited."),
        }
        widgets: ClassVar[Any] = {
            "channel": SuggestingInput(lambda: channels_by_key().items()), "tag": SuggestingInput(_list_tags),
        }  # fmt: skip


def unfold_edits(form: Any) -> None:
    """Show sections with errors or edits, which are folded or of another kind.

    Django overlooks the errors of fields that share a line.
    """
    seen = {*form.form.errors, *(form.form.changed_data if form.form.is_bound else ())}
    form.fieldsets = [
        (name, {**options, "classes": ()} if set(flatten(options["fields"])) & seen else options)
        for name, options in form.fieldsets
    ]


@admin.register(HarassmentRule)
class HarassmentRuleAdmin(HistoryAdmin, Retirable):
    form = HarassmentRuleForm
    list_display = ("summary", "kind", "scope", "enabled", "version")
    fieldsets = (  # the form shows those of the chosen kind, by `ops.css`
        (None, {"fields": (("kind", "scope"), "enabled")}),
        (_("How often"), {"fields": ("window",), "classes": ("at-kind", "at-kind-cap", "at-kind-dedupe")}),
        (None, {"fields": (("limit", "limits"),), "classes": ("at-kind", "at-kind-cap")}),
        (_("Of which messages"), {
            "fields": (("channel", "category"), "tag"), "classes": ("at-kind", "at-kind-cap", "at-kind-dedupe"),
        }),
        (_("Quiet hours"), {
            "fields": (("quiet_from", "quiet_to"), "timezone"), "classes": ("at-kind", "at-kind-quiet_hours"),
        }),
        (_("Life"), {"fields": ("version", "change_reason")}),
    )  # fmt: skip
    readonly_fields = ("version",)

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        unfold_edits(context["adminform"])
        return super().render_change_form(request, context, *args, **kwargs)

    def in_use(self, row: HarassmentRule) -> bool:
        """Always in use: verdicts refer to a rule by its version."""
        return True

    @ops_display(description=_("rule"))
    def summary(self, row: HarassmentRule) -> str:
        span, whom = describe_duration(row.window), row.get_scope_display()
        texts = {
            "cap": gettext("At most %(limit)s in %(span)s (%(whom)s)"),
            "dedupe": gettext("The same content not again within %(span)s (%(whom)s)"),
            "conversation": gettext("Not into a new conversation"),
            "quiet_hours": gettext("Quiet from %(begin)s to %(end)s"),
        }
        limits = f" ({LimitsField().write(row.limits)})" if row.limits else ""
        figures = {"limit": f"{row.limit}{limits}", "span": span, "whom": whom, "begin": "–", "end": "–"}
        if row.quiet_from and row.quiet_to:
            figures |= {"begin": f"{row.quiet_from:%H:%M}", "end": f"{row.quiet_to:%H:%M}"}
        parts = [row.channel, row.category and row.get_category_display(), row.tag]
        return " · ".join([texts.get(row.kind, row.kind) % figures, *filter(None, parts)])


@admin.register(EventType)
class EventTypeAdmin(OpsAdmin):
    list_display = ("key", "name", "is_activity", "created_at")
    search_fields = ("key", "name")
    fields = ("key", "name", "is_activity")
    fixed_fields = ("key",)
