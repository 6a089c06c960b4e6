from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.http import HttpRequest
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.decorators import display

from scheduling.admin.base import CheckedForm, KeepsOthersEdits, WithHistory, plainly
from scheduling.admin.form_fields import DurationField
from scheduling.admin.labels import spoken
from scheduling.admin.retirement import Retirable, RetiredFilter
from sessions.admin.policies import NOT_BACKWARDS
from sessions.models import Campaign
from sessions.validation import check_campaign


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
            "starts_at": _("Of several that run at once the latest to begin holds."),
        }


@admin.register(Campaign)
class CampaignAdmin(KeepsOthersEdits, WithHistory, Retirable):
    form = CampaignForm
    list_display = ("key", "wait", "starts_at", "ends_at", "shown_state", "version")
    list_filter = (RetiredFilter,)
    list_filter_submit = False
    search_fields = ("key",)
    readonly_fields = ("version",)
    write_only = frozenset({"change_reason"})
    shown_as: ClassVar[dict[str, str]] = {"threshold": "threshold_text"}
    threshold_text = plainly("threshold", _("silent after"), spoken)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        life = ("enabled", "change_reason") if obj is None else ("enabled", "version", "change_reason")
        return [
            (None, {"fields": ("key", "threshold"), "description": NOT_BACKWARDS}),
            (_("When"), {"fields": ("starts_at", "ends_at")}),
            (_("Life"), {"fields": life}),
        ]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        return [*fields, "key"] if obj else fields

    def in_use(self, row: Campaign) -> bool:
        """Chats were judged by it, unless it never began."""
        return bool(row.starts_at <= now())

    @display(description=_("silent after"), ordering="threshold")  # type: ignore[untyped-decorator]
    def wait(self, row: Campaign) -> str:
        return spoken(row.threshold)

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
            return "coming", gettext("Begins in %(span)s") % {"span": spoken(_whole(row.starts_at - now()))}
        return "running", gettext("Runs for %(span)s more") % {"span": spoken(_whole(row.ends_at - now()))}


def _whole(span: timedelta) -> timedelta:
    """Nobody reads seconds here, unless there is nothing else."""
    minute = timedelta(minutes=1)
    return span // minute * minute if span >= minute else minute
