"""Pages of what informs others: the alert receiver with the open alerts, and outgoing webhooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget, UnfoldAdminSplitDateTimeWidget

from scheduling.admin.base import (
    BigTable,
    CheckedForm,
    Confirmation,
    HistoryAdmin,
    ReadOnlyAdmin,
    Retirable,
    SingleRowAdmin,
    ops_display,
    row_action,
)
from scheduling.admin.form_fields import SEALED, NamesField, SecretField, get_readable_secrets, merge_secrets
from scheduling.admin.labels import describe_problem, translate_reason
from scheduling.admin.matrix.channel import list_known_communities
from scheduling.admin.matrix.template import describe_outcome
from scheduling.admin.page_reads import count_within
from scheduling.admin.row_edits import OptimisticLockForm
from scheduling.admin.shown_values import format_instant, format_moment, insert_values, render_tag
from scheduling.channels.base import channel_kinds
from scheduling.delivery.routing import NoTarget
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.models import (
    Alert,
    AlertReceiver,
    ChannelConfig,
    Community,
    WebhookEvent,
    WebhookMessage,
    WebhookSubscription,
)
from scheduling.models.encrypted import Sealed, Unreadable
from scheduling.monitoring.alerts import BY_KEY, find_receiver_route, send_alert_message
from scheduling.monitoring.collectors import read_webhook_backlogs
from scheduling.webhooks import (
    MOST_REPLAYED,
    SECRET_SETTINGS,
    enable_endpoint,
    pause_endpoint,
    replay_messages,
    write_test_message,
)


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
                find_receiver_route(row)
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
        return describe_problem(code, detail) or "–"

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


FILTER_LABELS = {"node": _("only nodes"), "platform": _("only platforms"), "shop": _("only shops")}


class WebhookForm(CheckedForm):
    written_columns = ("config", "filter")

    events = forms.MultipleChoiceField(
        label=_("events"), choices=WebhookEvent.choices, widget=UnfoldAdminCheckboxSelectMultipleWidget
    )

    class Meta:
        model = WebhookSubscription
        exclude = ("config", "filter", "version")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config: Mapping[str, Any] = self.instance.config or {}
        self.stored = get_readable_secrets(self.config)
        for name in SECRET_SETTINGS:
            self.fields[f"secret_{name}"] = SecretField(name, bool(self.stored.get(name)))
        for name, label in FILTER_LABELS.items():
            self.fields[f"filter_{name}"] = NamesField(label=capfirst(label), help_text=_(
                "Keys, one a line; of a shop like pdd/s1. Empty: all. Events without such a field are sent."
            ))  # fmt: skip
            self.fields[f"filter_{name}"].initial = self.instance.filter.get(name, [])

    def values(self) -> dict[str, Any]:
        cleaned = super().values()
        wanted = {name: cleaned.pop(f"filter_{name}", []) for name in FILTER_LABELS}
        cleaned["filter"] = {name: keys for name, keys in wanted.items() if keys}
        given = {name: cleaned.pop(f"secret_{name}", "").strip() for name in SECRET_SETTINGS}
        if any(given.values()) or not isinstance(self.instance.config, Sealed):
            self.config = cleaned["config"] = merge_secrets(self.stored, given)
        self.filter = cleaned["filter"]
        return cleaned

    def find_error_field(self, path: str) -> str | None:
        root, _dot, rest = path.partition(".")
        name = rest.partition(".")[0]
        field = {"config": f"secret_{name}", "filter": f"filter_{name}"}.get(root, root)
        return field if field in self.fields else super().find_error_field(path)


class ReplayRangeForm(forms.Form):
    since = forms.SplitDateTimeField(label=_("from"), widget=UnfoldAdminSplitDateTimeWidget)
    until = forms.SplitDateTimeField(label=_("to"), widget=UnfoldAdminSplitDateTimeWidget)


@admin.register(WebhookSubscription)
class WebhookAdmin(HistoryAdmin, Retirable):
    form = WebhookForm
    list_display = ("key", "shown_state", "waiting", "last_error", "last_success", "enabled")
    list_select_related = ("endpoint",)
    search_fields = ("key",)
    readonly_fields = ("version", "shown_state", "last_error", "last_success")
    fixed_fields = ("key",)
    actions_detail = (
        "pause_sending",
        "enable_sending",
        "send_test_message",
        "send_range_again",
        "retire",
        "bring_back",
    )

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        filters = tuple(f"filter_{name}" for name in FILTER_LABELS)
        where = SEALED if obj is not None and isinstance(obj.config, Sealed) else _(
            "The secret signs each message (Standard Webhooks). During a rotation enter both, with a space between."
        )  # fmt: skip
        state = [(_("Receiver state"), {"fields": ("shown_state", "last_error", "last_success")})] if obj else []
        return [
            (None, {"fields": ("key", "enabled", "events", *filters)}),
            (_("Receiver"), {"fields": ("secret_url", "secret_secret"), "description": where}),
            *state,
            (_("Life"), {"fields": ("version", "change_reason")}),
        ]

    def load_rows(self, rows: Iterable[Any]) -> None:
        backlogs = count_within(read_webhook_backlogs) or {}
        for row in rows:
            row.backlog = backlogs.get(row.pk)

    def in_use(self, row: Any) -> bool:
        return bool(row.messages.exists())

    @ops_display(description=_("state"))
    def shown_state(self, row: WebhookSubscription) -> SafeString:
        if row.retired_at or not row.enabled:
            return render_tag(gettext("Off"))
        if isinstance(row.config, Sealed):
            return render_tag(gettext("Secrets cannot be decrypted here"), "danger")
        until = format_moment(row.endpoint.rest_until) if row.endpoint.rest_until else ""
        text, tone = {
            "ok": (gettext("All is well"), "success"),
            "paused": (gettext("Paused"), "warning"),
            "resting": (insert_values(gettext("Does not answer, rests until %(at)s"), at=until), "warning"),
            "disabled": (gettext("Disabled: the receiver is gone"), "danger"),
        }[row.endpoint.state]
        return render_tag(text, tone)

    @ops_display(description=_("waiting"))
    def waiting(self, row: Any) -> str:
        return f"{row.backlog.waiting:,}" if row.backlog else "–"

    @ops_display(description=_("last error"))
    def last_error(self, row: WebhookSubscription) -> str:
        code, _colon, detail = row.endpoint.problem.partition(": ")
        if not code or not row.endpoint.problem_at:
            return "–"
        return format_html("{} ({})", describe_problem(code, detail), format_moment(row.endpoint.problem_at))

    @ops_display(description=_("last success"))
    def last_success(self, row: WebhookSubscription) -> str:
        return format_moment(row.endpoint.delivered_at) if row.endpoint.delivered_at else "–"

    @row_action(_("Pause"), icon="pause_circle", permission="change")
    def pause_sending(self, request: HttpRequest, row: WebhookSubscription) -> Confirmation:
        return Confirmation(
            title=gettext("Pause “%(what)s”?") % {"what": row}, button=gettext("Pause"),
            text=gettext("Messages are kept and sent after you enable the webhook again."),
            act=lambda: pause_endpoint(row), logged=gettext("Paused."),
        )  # fmt: skip

    @row_action(_("Enable"), icon="play_circle", permission="change")
    def enable_sending(self, request: HttpRequest, row: WebhookSubscription) -> Confirmation:
        return Confirmation(
            title=gettext("Enable “%(what)s”?") % {"what": row}, button=gettext("Enable"),
            text=gettext("Ends a pause, a rest or a disabled state. Waiting messages are sent at once."),
            act=lambda: enable_endpoint(row), logged=gettext("Enabled."),
        )  # fmt: skip

    @row_action(_("Send a test"), icon="send", permission="change")
    def send_test_message(self, request: HttpRequest, row: WebhookSubscription) -> Confirmation:
        return Confirmation(
            title=gettext("Send a test to “%(who)s”") % {"who": row}, button=gettext("Send the test"),
            text=gettext("Sends a message of the type webhook.test within seconds."),
            act=lambda: write_test_message(row), logged=gettext("Sent a test."),
            done=gettext("The test is in the list of messages, with its result."),
        )  # fmt: skip

    @row_action(_("Send a range again"), icon="replay", permission="change")
    def send_range_again(self, request: HttpRequest, row: WebhookSubscription) -> Confirmation:
        form = ReplayRangeForm(request.POST or None)

        def act() -> None:
            given = form.cleaned_data
            try:
                count = replay_messages(row, given["since"], given["until"], by=request.user.get_username())
            except InvalidInput:
                form.add_error("until", gettext(
                    "The range must not be empty and have at most %(most)s messages."
                ) % {"most": f"{MOST_REPLAYED:,}"})  # fmt: skip
                return
            self.log_change(request, row, gettext("Messages that are sent again: %(count)s.") % {"count": count})
            messages.success(request, gettext("Messages that are sent again: %(count)s.") % {"count": count})

        return Confirmation(
            title=gettext("Send messages of “%(what)s” again") % {"what": row}, button=gettext("Send again"), form=form,
            text=gettext("Sends again what happened in this time and was delivered or given up. Receivers know a "
                         "message by its id."),
            act=act,
        )  # fmt: skip


@admin.register(WebhookMessage)
class WebhookMessageAdmin(BigTable, ReadOnlyAdmin):
    list_display = ("message_id", "subscription", "type", "object_key", "occurred_at", "state", "attempt",
                    "next_attempt", "shown_problem")  # fmt: skip
    list_filter = ("subscription", "state")
    list_select_related = ("subscription",)
    ordering = ("-pk",)
    fields = ("message_id", "subscription", "type", "object_key", "occurred_at", "data", "state", "attempt",
              "next_attempt", "first_tried_at", "ended_at", "status", "shown_problem")  # fmt: skip

    @ops_display(description=_("next attempt at"), ordering="due_at")
    def next_attempt(self, row: WebhookMessage) -> str:
        return format_moment(row.due_at) if row.state == WebhookMessage.State.WAITING else "–"

    @ops_display(description=_("last error"))
    def shown_problem(self, row: WebhookMessage) -> str:
        code, _colon, detail = row.problem.partition(": ")
        return describe_problem(code, detail) or "–"
