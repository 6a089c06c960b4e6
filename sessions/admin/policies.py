"""Edit silence policies and campaigns in the back office."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.timezone import now
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from scheduling.admin.base import CheckedForm, HistoryAdmin, Retirable, ops_display
from scheduling.admin.form_fields import DurationField, NamesField, WindowsField
from scheduling.admin.shown_values import render_tag
from scheduling.monitoring.duration_text import describe_duration
from sessions.admin.dashboard import LivePages
from sessions.models import Campaign, SilencePolicy
from sessions.policy import CUSTOMER, LONGEST_WAIT, own_tags

NOT_BACKWARDS = _(
    "A change applies from the next frame of a chat. Timers that are already running keep their deadline."
)

AT_ITS_START = _(
    "At its start and after an edit of the threshold, running timers get it, except those that end within a second "
    "or wait for an agent. When it ends, they keep their deadline."
)


class SilencePolicyForm(CheckedForm):
    tags = NamesField(
        label=_("tags"),
        help_text=_(
            "The chat must have all of these tags, which gateways send. The policy with most tags applies; of equal "
            "ones, the one with the shortest threshold, then the first by key. Empty: the key."
        ),
    )
    threshold = DurationField(
        label=_("silent after"), help_text=_("Without any frame of the user for so long, like 60s; 2s to 12h.")
    )
    hours = WindowsField(
        label=_("opening hours"),
        blank_is_default=False,
        help_text=_("Only this time counts. One a line, like “working 09:00-18:00”. Empty: all time."),
    )
    jitter = DurationField(
        label=_("random delay (jitter)"),
        help_text=_("Random extra time, so that chats do not all fall silent at once; for example 5s or 0s."),
    )
    grace = DurationField(
        label=_("longer at the end"),
        help_text=_(
            "One extension at the last moment, by the policy of that moment, so also for running timers; for example "
            "20s."
        ),
    )

    class Meta:
        model = SilencePolicy
        exclude = ("version", "retired_at")
        help_texts: ClassVar[Any] = {
            "key": _("Name of the policy. “default” applies to every chat without another policy."),
            "after": _(
                "“Any message”: every frame of the customer restarts the timer. With the last choice the customer "
                "waits for an agent: the trigger is session.unanswered, and only a message of an agent ends the wait. "
                "A chat has the most specific policy of this choice and the most specific other one. With both, the "
                "other one runs only after a message of an agent."
            ),
            "max_nudges": _(
                "Maximum number of messages or steps for one silence. A frame of the user restarts the count."
            ),
            "growth": _("Each gap between two messages is so many times the one before, up to 13 open hours."),
        }

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        key = self.instance.key or cleaned.get("key")
        if key and "tags" in cleaned and (problem := _find_same_tags(key, cleaned["tags"], cleaned.get("after"))):
            self.add_error("tags", problem)
        return cleaned


def _find_same_tags(key: str, tags: list[str], after: str | None) -> str:
    """Return the error of a policy whose tags another one has that waits for the same side, or ""."""
    others = SilencePolicy.objects.filter(retired_at=None, tags=own_tags(key, tags)).exclude(key=key)
    other = next((each for each in others if (each.after == CUSTOMER) == (after == CUSTOMER)), None)
    return gettext("The policy %(key)s has the same tags.") % {"key": other.key} if other else ""


@admin.register(SilencePolicy)
class SilencePolicyAdmin(LivePages, HistoryAdmin, Retirable):
    form = SilencePolicyForm
    list_display = ("key", "shown_tags", "after", "wait", "message_times", "grace", "shown_state", "version")
    search_fields = ("key",)
    readonly_fields = ("version",)
    fixed_fields = ("key",)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        life = ("change_reason",) if obj is None else ("version", "change_reason")
        return [
            (None, {"fields": ("key",) if obj and obj.is_default else (("key", "tags"),)}),
            (
                pgettext_lazy("silence", "When"),
                {
                    "fields": ("after", ("threshold", "jitter"), ("grace", "grace_for"), "hours"),
                    "description": NOT_BACKWARDS,
                },
            ),
            (_("How often"), {"fields": (("max_nudges", "growth"),)}),
            (_("Life"), {"fields": life}),
        ]

    def in_use(self, row: SilencePolicy) -> bool:
        """Return True: sessions were judged by the policy, and its history must remain."""
        return True

    def explain_retirement_block(self, row: SilencePolicy) -> str:
        return gettext("Every chat without another policy follows it.") if row.is_default else ""

    def explain_restoration_block(self, row: SilencePolicy) -> str:
        return _find_same_tags(row.key, row.tags, row.after) or super().explain_restoration_block(row)

    @ops_display(description=_("tags"))
    def shown_tags(self, row: SilencePolicy) -> str:
        return " + ".join(row.tags) or gettext("all others")

    @ops_display(description=_("silent after"), ordering="threshold")
    def wait(self, row: SilencePolicy) -> str:
        if not row.jitter:
            return describe_duration(row.threshold)
        return gettext("%(span)s and up to %(more)s") % {
            "span": describe_duration(row.threshold),
            "more": describe_duration(row.jitter),
        }

    @ops_display(description=_("messages after"))
    def message_times(self, row: SilencePolicy) -> str:
        """Return the times of the messages of one silence, counted from the last frame."""
        at, spans = timedelta(0), []
        for number in range(row.max_nudges):
            at += min(row.threshold * row.growth**number, LONGEST_WAIT)
            spans.append(describe_duration(at))
        return " · ".join(spans[:4]) + (" …" if len(spans) > 4 else "")


class CampaignForm(CheckedForm):
    threshold = DurationField(
        label=_("silent after"), help_text=_("For every chat while it runs, like 90s; 2s to 12h.")
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
    list_display = ("key", "threshold", "starts_at", "ends_at", "shown_state", "version")
    search_fields = ("key",)
    readonly_fields = ("version",)
    fixed_fields = ("key",)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        life = ("enabled", "change_reason") if obj is None else ("enabled", "version", "change_reason")
        return [
            (None, {"fields": ("key", "threshold"), "description": AT_ITS_START}),
            (pgettext_lazy("campaign", "When"), {"fields": ("starts_at", "ends_at")}),
            (_("Life"), {"fields": life}),
        ]

    def in_use(self, row: Campaign) -> bool:
        """Return whether the campaign has started, so that sessions were judged by it."""
        return bool(row.starts_at <= now())

    @ops_display(description=_("state"))
    def shown_state(self, row: Campaign) -> SafeString:
        if row.retired_at:
            return render_tag(gettext("Retired"))
        if not row.enabled:
            return render_tag(gettext("Switched off"), "warning")
        if row.ends_at <= now():
            return render_tag(gettext("Over"))
        if row.starts_at > now():
            text = gettext("Starts in %(span)s") % {"span": _describe_minutes(row.starts_at - now())}
            return render_tag(text, "info")
        text = gettext("Runs for %(span)s more") % {"span": _describe_minutes(row.ends_at - now())}
        return render_tag(text, "success")


def _describe_minutes(span: timedelta) -> str:
    """Describe a span rounded down to whole minutes, at least one."""
    minute = timedelta(minutes=1)
    return describe_duration(max(span // minute * minute, minute))
