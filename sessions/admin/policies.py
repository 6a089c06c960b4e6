"""Edit silence policies and campaigns in the back office."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.http import HttpRequest
from django.urls import URLPattern, path
from django.utils.timezone import now
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _
from unfold.decorators import display

import sessions.admin.labels  # noqa: F401  (teaches the words)
from scheduling.admin.base import CheckedForm, HistoryAdmin, make_readonly_display
from scheduling.admin.form_fields import DurationField
from scheduling.admin.retirement import Retirable, RetiredFilter
from scheduling.monitoring.duration_text import describe_duration
from sessions.admin import dashboard
from sessions.models import Campaign, SilencePolicy
from sessions.validation import check_campaign, check_policy

NOT_BACKWARDS = _(
    "A change applies from the next frame of a chat. Timers that are already running keep their deadline."
)


class SilencePolicyForm(CheckedForm):
    check = staticmethod(check_policy)

    threshold = DurationField(
        label=_("silent after"), help_text=_("Without any frame of the user for so long, like 60s; 2s to 12h.")
    )
    jitter = DurationField(
        label=_("random delay (jitter)"),
        help_text=_("Random extra time, so that chats do not all fall silent at once; for example 5s or 0s."),
    )
    grace = DurationField(
        label=_("longer while writing"),
        help_text=_("One extension for a user who is writing and has not sent the message; for example 20s. 0s: none."),
    )

    class Meta:
        model = SilencePolicy
        exclude = ("version", "retired_at")
        help_texts: ClassVar[Any] = {
            "tag": _(
                "Tag that gateways send with a chat, for example vip. “default” applies to every tag without a policy."
            ),
            "max_nudges": _(
                "Maximum number of guide messages for one silence. A frame of the user restarts the count."
            ),
            "growth": _("Each gap between two messages is so many times the one before."),
        }


@admin.register(SilencePolicy)
class SilencePolicyAdmin(HistoryAdmin, Retirable):
    form = SilencePolicyForm
    list_display = ("tag", "wait", "ladder", "grace_text", "shown_state", "version")
    list_filter = (RetiredFilter,)
    list_filter_submit = False
    search_fields = ("tag",)
    readonly_fields = ("version",)
    write_only = frozenset({"change_reason"})
    shown_as: ClassVar[dict[str, str]] = {
        "threshold": "threshold_text", "jitter": "jitter_text", "grace": "grace_text", "growth": "growth_text",
    }  # fmt: skip
    threshold_text = make_readonly_display("threshold", _("silent after"), describe_duration)
    jitter_text = make_readonly_display(
        "jitter", _("random delay (jitter)"), lambda span: describe_duration(span) if span else "–"
    )
    grace_text = make_readonly_display(
        "grace", _("longer while writing"), lambda span: describe_duration(span) if span else "–"
    )
    growth_text = make_readonly_display("growth", _("growth of the gaps"), "{:g}".format)

    def get_urls(self) -> list[URLPattern]:
        look = self.admin_site.admin_view(lambda request: dashboard.live_chats_page(self, request))
        return [path("live/", look, name="chat_sessions_live"), *super().get_urls()]

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        life = ("change_reason",) if obj is None else ("version", "change_reason")
        return [
            (None, {"fields": ("tag",)}),
            (
                pgettext_lazy("silence", "When"),
                {"fields": (("threshold", "jitter"), "grace"), "description": NOT_BACKWARDS},
            ),
            (_("How often"), {"fields": (("max_nudges", "growth"),)}),
            (_("Life"), {"fields": life}),
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        return [*fields, "tag"] if obj else fields

    def in_use(self, row: SilencePolicy) -> bool:
        """Return True: sessions were judged by the policy, and its history must remain."""
        return True

    def explain_retirement_block(self, row: SilencePolicy) -> str:
        return gettext("Every tag without a policy of its own follows it.") if row.is_default else ""

    @display(description=_("silent after"), ordering="threshold")  # type: ignore[untyped-decorator]
    def wait(self, row: SilencePolicy) -> str:
        if not row.jitter:
            return describe_duration(row.threshold)
        return gettext("%(span)s and up to %(more)s") % {
            "span": describe_duration(row.threshold),
            "more": describe_duration(row.jitter),
        }

    @display(description=_("messages after"))  # type: ignore[untyped-decorator]
    def ladder(self, row: SilencePolicy) -> str:
        """Return the times of the messages of one silence, counted from the last frame."""
        at, spans = timedelta(0), []
        for number in range(row.max_nudges):
            at += row.threshold * row.growth**number
            spans.append(describe_duration(at))
        return " · ".join(spans[:4]) + (" …" if len(spans) > 4 else "")

    @display(description=_("state"), label={"on": "success", "retired": "default"})  # type: ignore[untyped-decorator]
    def shown_state(self, row: SilencePolicy) -> tuple[str, str]:
        return ("retired", gettext("Retired")) if row.retired_at else ("on", gettext("In use"))


class CampaignForm(CheckedForm):
    check = staticmethod(check_campaign)

    threshold = DurationField(
        label=_("silent after"), help_text=_("For the chats of every tag while it runs, like 90s; 2s to 12h.")
    )

    class Meta:
        model = Campaign
        exclude = ("version", "retired_at")
        help_texts: ClassVar[Any] = {
            "key": _("Like double-11-2026."),
            "starts_at": _("When campaigns overlap, the one that started last applies."),
        }


@admin.register(Campaign)
class CampaignAdmin(HistoryAdmin, Retirable):
    form = CampaignForm
    list_display = ("key", "wait", "starts_at", "ends_at", "shown_state", "version")
    list_filter = (RetiredFilter,)
    list_filter_submit = False
    search_fields = ("key",)
    readonly_fields = ("version",)
    write_only = frozenset({"change_reason"})
    shown_as: ClassVar[dict[str, str]] = {"threshold": "threshold_text"}
    threshold_text = make_readonly_display("threshold", _("silent after"), describe_duration)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        life = ("enabled", "change_reason") if obj is None else ("enabled", "version", "change_reason")
        return [
            (None, {"fields": ("key", "threshold"), "description": NOT_BACKWARDS}),
            (pgettext_lazy("campaign", "When"), {"fields": ("starts_at", "ends_at")}),
            (_("Life"), {"fields": life}),
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        return [*fields, "key"] if obj else fields

    def in_use(self, row: Campaign) -> bool:
        """Return whether the campaign has started, so that sessions were judged by it."""
        return bool(row.starts_at <= now())

    @display(description=_("silent after"), ordering="threshold")  # type: ignore[untyped-decorator]
    def wait(self, row: Campaign) -> str:
        return describe_duration(row.threshold)

    @display(  # type: ignore[untyped-decorator]
        description=_("state"),
        label={"running": "success", "coming": "info", "over": "default", "off": "warning", "retired": "default"},
    )
    def shown_state(self, row: Campaign) -> tuple[str, str]:
        if row.retired_at:
            return "retired", gettext("Retired")
        if not row.enabled:
            return "off", gettext("Switched off")
        if row.ends_at <= now():
            return "over", gettext("Over")
        if row.starts_at > now():
            return "coming", gettext("Starts in %(span)s") % {
                "span": describe_duration(_floor_to_minutes(row.starts_at - now()))
            }
        return "running", gettext("Runs for %(span)s more") % {
            "span": describe_duration(_floor_to_minutes(row.ends_at - now()))
        }


def _floor_to_minutes(span: timedelta) -> timedelta:
    """Round down to whole minutes, at least one."""
    minute = timedelta(minutes=1)
    return span // minute * minute if span >= minute else minute
