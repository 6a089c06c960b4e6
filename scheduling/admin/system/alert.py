"""The page of the alert receiver, with the open alerts."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html_join
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from scheduling.admin.base import SingleRowAdmin, ops_display, row_action
from scheduling.admin.labels import translate_reason
from scheduling.admin.matrix.channel import list_known_communities
from scheduling.admin.matrix.template import describe_outcome
from scheduling.admin.row_edits import OptimisticLockForm
from scheduling.admin.shown_values import format_instant
from scheduling.channels.kinds import channel_kinds
from scheduling.delivery.routing import NoTarget
from scheduling.ids import new_id
from scheduling.models import Alert, AlertReceiver, ChannelConfig, Community
from scheduling.models.encrypted import Unreadable
from scheduling.monitoring.alerts import BY_KEY, resolve_target, send_alert_message


class AlertReceiverForm(OptimisticLockForm):
    class Meta:
        model = AlertReceiver
        fields: ClassVar[Any] = ("enabled", "channel", "community", "address")
        help_texts: ClassVar[Any] = {
            "community": _("For robots of group chats: the chat whose robot is used."),
            "address": _("For e-mail."),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Kinds that reach people without a customer's chat or a shop.
        kinds = [
            key for key, kind in channel_kinds().items() if kind.secret_fields and kind.address_key in ("", "email")
        ]
        usable = Q(kind__in=kinds, retired_at=None) | Q(pk=self.instance.channel_id)
        self.fields["channel"].queryset = ChannelConfig.objects.filter(usable)  # type: ignore[attr-defined]
        known = Q(pk__in=list_known_communities().values("pk")) | Q(pk=self.instance.community_id)
        self.fields["community"].queryset = Community.objects.filter(known)  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        if not self.errors:
            row = AlertReceiver(**{name: cleaned[name] for name in ("channel", "community", "address")})
            try:
                resolve_target(row)
            except NoTarget as error:
                kind = channel_kinds().get(row.channel.kind)
                field = "address" if kind is not None and kind.address_key else "community"
                self.add_error(field, translate_reason(error.reason))
            except Unreadable:
                pass  # unreadable on this server; another node may have the key
        return cleaned


@admin.register(AlertReceiver)
class AlertReceiverAdmin(SingleRowAdmin):
    form = AlertReceiverForm
    readonly_fields = ("open_alerts", "notified_at", "shown_problem")
    actions_detail = ("send_test",)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        recent = [(_("Recent alerts"), {"fields": self.readonly_fields})] if obj else []
        return [(None, {"fields": ("enabled", "channel", "community", "address")}), *recent]

    def save_model(self, request: HttpRequest, obj: AlertReceiver, form: Any, change: bool) -> None:
        """Save the row, and send what could not be sent at once."""
        obj.problem = ""
        Alert.objects.filter(tried=True, notified_at=None).update(message_at=now())
        super().save_model(request, obj, form, change)

    @ops_display(description=_("active alerts"))
    def open_alerts(self, row: AlertReceiver) -> str:
        rows = Alert.objects.filter(ended_at=None, condition__in=BY_KEY)
        lines = [(BY_KEY[alert.condition].name([alert.subject]), format_instant(alert.since)) for alert in rows]
        return format_html_join("", "<div>{} · {}</div>", lines) or gettext("All is well")

    @ops_display(description=_("problem"))
    def shown_problem(self, row: AlertReceiver) -> str:
        code, _space, detail = row.problem.partition(" ")
        return " – ".join(part for part in (translate_reason(code), detail) if part) if code else "–"

    @row_action(_("Send a test"), icon="send", permission="change")
    def send_test(self, request: HttpRequest, row: AlertReceiver) -> HttpResponse:
        result = None
        body = gettext(
            "This is a test message. Alerts of Aftertouch arrive here with problem, start time and severity."
        )
        if request.method == "POST":
            subject = gettext("[Test] Alerts")
            result = describe_outcome(send_alert_message(row, subject, f"{subject}\n{body}", now(), new_id()))
            self.log_change(request, row, gettext("Sent a test."))
        return self.page(
            request, "ops/send_test.html", gettext("Send a test to “%(who)s”") % {"who": row}, form=forms.Form(),
            result=result, body=body, original=row, back=self.url("change", row.pk),
        )  # fmt: skip
