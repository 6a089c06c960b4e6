"""Pages of channels, of their receivers, and of communities. Secrets can be written and are never displayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.db.models.functions import Length
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.admin import TabularInline
from unfold.widgets import UnfoldAdminSelectWidget

from scheduling.admin.base import CheckedForm, HistoryAdmin, Retirable, ops_display, row_action, table_page
from scheduling.admin.form_fields import (
    MASK,
    SEALED,
    DurationsField,
    SecretField,
    SettingsField,
    get_readable_secrets,
    merge_secrets,
)
from scheduling.admin.page_reads import count_within
from scheduling.admin.shown_values import format_moment, insert_values
from scheduling.admin.touches.pause import is_paused, load_paused_scopes, redirect_to_pause_page
from scheduling.channels.base import channel_kinds, list_secret_names, redirects_secret
from scheduling.configuration.validation import channel_kind_for_target, check_community
from scheduling.ids import parse_number
from scheduling.models import ChannelConfig, Community, DisabledTarget, HarassmentRule
from scheduling.models.encrypted import Sealed
from scheduling.monitoring.receivers import ReceiverStatus, list_receivers

PER_PAGE = 25  #: receivers
KIND_LABELS = {
    "webhook": _("Webhook"), "wecom": _("WeCom robot"), "dingtalk": _("DingTalk robot"), "feishu": _("Feishu robot"),
    "wecom_app": _("WeCom application message"), "wechat_kf": _("WeChat customer service"),
    "wechat_official": _("WeChat official account"), "wechat_miniprogram": _("WeChat mini-program"),
    "sms_aliyun": _("SMS by Alibaba Cloud"), "sms_tencent": _("SMS by Tencent Cloud"),
    "http": _("HTTP API (described here)"), "email": _("E-mail"), "inapp": _("In-app message"), "rpa": _("RPA job"),
    "log": _("Log only"),
}  # fmt: skip


LIMITS = _(
    "Most messages to each receiver in a calendar day and month of the server's time zone, beside the "
    "limits of the kind. Empty: no limit. Touches beyond a limit wait for the next day or month."
)


class ChannelForm(CheckedForm):
    written_columns = ("config",)

    kind = forms.ChoiceField(
        label=_("kind"), widget=UnfoldAdminSelectWidget,
        choices=lambda: [(kind, KIND_LABELS.get(kind, kind)) for kind in channel_kinds()],
    )  # fmt: skip
    settings = SettingsField(
        label=_("other settings"),
        help_text=_(
            "One “name: value” a line. Robots: format, mentions. E-mail: from, reply_to, bounces_to. The how-to pages "
            "of the documentation list the settings of the other kinds."
        ),
    )
    retry_delays = DurationsField(
        label=_("retries after"),
        required=False,
        help_text=_("When to try again after a failure, like 10s, 1m, 5m, 30m, 2h (used where empty)."),
    )

    class Meta:
        model = ChannelConfig
        exclude = ("config", "version")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config: Mapping[str, Any] = self.instance.config or {}  #: the value after the form is clean
        self.stored = get_readable_secrets(self.config)
        self.fields["settings"].widget.attrs["rows"] = 12  # a described channel has as many
        self.fields["settings"].initial = {k: v for k, v in self.stored.items() if k not in list_secret_names()}
        for name in list_secret_names():
            self.fields[f"secret_{name}"] = SecretField(name, bool(self.stored.get(name)))

    def values(self) -> dict[str, Any]:
        cleaned = super().values()
        if "settings" in cleaned and "kind" in cleaned:
            given = {name: cleaned.get(f"secret_{name}", "").strip() for name in list_secret_names()}
            same_kind = cleaned["kind"] == self.instance.kind or not self.instance.kind
            config = {**cleaned["settings"], **merge_secrets(self.stored if same_kind else {}, given)}
            kept = not given.get("secret") and self.stored.get("secret") and config.get("secret")
            if kept and redirects_secret(cleaned["kind"], self.stored, config):
                self.add_error("secret_secret", _("Enter the secret again for another host."))
            if config or not same_kind or not isinstance(self.instance.config, Sealed):
                self.config = cleaned["config"] = config
        return cleaned

    def find_error_field(self, path: str) -> str | None:
        root, _dot, name = path.partition(".")
        if root == "config":
            return f"secret_{name}" if f"secret_{name}" in self.fields else "settings"
        return super().find_error_field(path)


class DisabledInline(TabularInline):  # type: ignore[misc]
    model = DisabledTarget
    extra = 0
    fields = readonly_fields = ("chat_id", "reason", "disabled_at")
    verbose_name_plural = _("Disabled targets (remove a line to send there again)")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow removal to users who may edit the channel."""
        return bool(request.user.has_perm("scheduling.change_channelconfig"))


@admin.register(ChannelConfig)
class ChannelAdmin(HistoryAdmin, Retirable):
    form = ChannelForm
    inlines = (DisabledInline,)
    list_display = (
        "name_or_key", "key", "kind_name", "idempotent", "timeout", "node_count", "shown_state", "disabled_count",
    )  # fmt: skip
    search_fields = ("key", "name", "kind")
    readonly_fields = ("version",)
    fixed_fields = ("key",)
    write_only = frozenset({"change_reason", "settings"})
    actions_detail = ("pause_or_resume", "retire", "bring_back")

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        receiver = (*(f"secret_{name}" for name in reversed(list_secret_names())), "settings")
        where = _(
            "The address is for a webhook, an HTTP API or a mail relay. Robots need none: theirs belong to the "
            "communities. Vendors of messages to a person have their own."
        )
        if obj is not None and isinstance(obj.config, Sealed):
            where = SEALED
        return [
            (None, {"fields": ("key", "name", "kind", "idempotent", "timeout", "retry_delays")}),
            (_("Vendor limits"), {"fields": ("daily_limit", "monthly_limit"), "description": LIMITS}),
            (_("Receiver"), {"fields": receiver, "description": where}),
            (_("Life"), {"fields": ("version", "change_reason")}),
        ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[ChannelConfig]:
        disabled = Count("disabledtarget", distinct=True)
        used = Count("nodes", filter=Q(nodes__retired_at=None), distinct=True)
        return super().get_queryset(request).annotate(disabled=disabled, used=used)  # type: ignore[no-any-return]

    def load_rows(self, rows: Iterable[Any]) -> None:
        scopes = load_paused_scopes()
        for row in rows:
            row.paused_scopes = scopes

    def in_use(self, row: Any) -> bool:
        """Return whether a node has it or a rule names it. The name of a kind stays valid without the channel."""
        named = row.key not in channel_kinds() and HarassmentRule.objects.filter(channel=row.key).exists()
        return named or bool(row.nodes.exists())

    @ops_display(description=_("kind"), ordering="kind")
    def kind_name(self, row: ChannelConfig) -> str:
        return str(KIND_LABELS.get(row.kind, row.kind))

    @ops_display(description=_("nodes"))
    def node_count(self, row: Any) -> int:
        return int(row.used)

    @ops_display(description=_("disabled targets"))
    def disabled_count(self, row: Any) -> str:
        return format_html('<span class="at-bad">{}</span>', row.disabled) if row.disabled else "0"

    @ops_display(
        description=_("state"),
        label={"on": "success", "paused": "warning", "unreadable": "danger", "retired": "default"},
    )
    def shown_state(self, row: Any) -> tuple[str, str]:
        if row.retired_at:
            return "retired", gettext("Retired")
        if isinstance(row.config, Sealed):
            return "unreadable", gettext("Secrets cannot be decrypted here")
        paused = is_paused(row.paused_scopes, row.key)
        return ("paused", gettext("Paused")) if paused else ("on", gettext("Enabled"))

    @row_action(_("Pause or resume"), icon="pause_circle", permission="scheduling.add_pause")
    def pause_or_resume(self, request: HttpRequest, row: ChannelConfig) -> HttpResponse:
        return redirect_to_pause_page(f"channel:{row.key}")

    @table_page("receivers/", "view", "scheduling.view_touch")
    def receivers(self, request: HttpRequest) -> HttpResponse:
        given = parse_number(request.GET.get("page", "")) or 1
        number = given if given < 1_000 else 1
        found = count_within(lambda: list_receivers((number - 1) * PER_PAGE, PER_PAGE), settings.TIMEOUTS.receivers)
        chats = [row.chat_id for row in found.rows if row.chat_id] if found else []
        names = dict(Community.objects.filter(chat_id__in=chats).values_list("chat_id", "name"))
        return self.page(
            request,
            "ops/receivers.html",
            gettext("Receivers"),
            receivers=None if found is None else [_describe_receiver(row, names) for row in found.rows],
            incomplete=found is not None and found.incomplete,
            previous=number - 1,
            next=number + 1 if found and found.more else 0,
            zone=settings.TIME_ZONE,
        )


def _describe_receiver(row: ReceiverStatus, names: dict[str, str]) -> dict[str, Any]:
    end = "–"
    if row.ends_at is not None:
        words = gettext("done at %(at)s") if row.counted_all else gettext("not before %(at)s")
        end = insert_values(words, at=format_moment(row.ends_at))
    rest: str = {  # why it gets nothing now
        "": "",
        "paused": gettext("Paused by an operator"),
        "throttled": gettext("Throttled by the vendor until %(at)s"),
        "target_down": gettext("Does not answer, rests until %(at)s"),
        "day": gettext("Limit of the day used up until %(at)s"),
        "month": gettext("Limit of the month used up until %(at)s"),
    }[row.resting_reason]
    if row.resting_until:
        rest = insert_values(rest, at=format_moment(row.resting_until))
    of_limit = {"day": gettext("%(used)s of %(limit)s today"), "month": gettext("%(used)s of %(limit)s this month")}
    return {
        "channel": row.channel,
        "kind": KIND_LABELS.get(row.channel.kind, row.channel.kind),
        "community": names.get(row.chat_id) or row.chat_id,
        "waiting": f"{row.waiting:,}" if row.counted_all else f"{row.waiting:,}+",
        "in_flight": row.in_flight,
        "rate": _format_rate(row.rate),
        "rest": rest,
        "tone": "danger" if row.resting_reason == "target_down" else "warning",
        "end": end,
        "used": [of_limit[use.period] % {"used": f"{use.used:,}", "limit": f"{use.limit:,}"} for use in row.uses],
    }


def _format_rate(rate: float | None) -> str:
    """Format touches per second: by the minute if they are few."""
    if not rate:
        return "–"
    if rate < 1:
        return gettext("%(count)s a minute") % {"count": f"{60 * rate:.3g}"}
    return gettext("%(count)s a second") % {"count": f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"}


def channels_by_key() -> dict[str, str]:
    return dict(ChannelConfig.objects.filter(retired_at=None).values_list("key", "kind"))


def list_known_communities() -> QuerySet[Community]:
    """Return communities with a name or a target, to choose from.

    All others are stored when they are first counted: as many as there are conversations.
    """
    known = Community.objects.alias(size=Length("targets")).exclude(name="", size=0)
    return known.filter(retired_at=None)


def list_targets(stored: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the possible targets of a community: by kind, by channel, and the stored ones."""
    kinds = channels_by_key()
    named = [kind for kind, each in channel_kinds().items() if not each.address_key and each.secret_fields]
    named += [key for key, kind in kinds.items() if kind in named and key not in named]
    named += [name for name in stored if name not in named]
    return [
        (name, sorted(kind.target_fields, reverse=True))
        for name in named
        if (kind := channel_kind_for_target(name, kinds))
    ]


class CommunityForm(CheckedForm):
    written_columns = ("targets",)

    class Meta:
        model = Community
        fields: ClassVar[Any] = ("chat_id", "name")

    def check(self, values: Mapping[str, Any], /) -> None:
        check_community(values, channels_by_key())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.targets: Mapping[str, Any] = self.instance.targets or {}  #: the value after the form is clean
        self.stored = get_readable_secrets(self.targets)
        self.places = list_targets(self.stored)
        for place, names in self.places:
            for name in names:
                self.fields[f"target_{place}_{name}"] = SecretField(name, bool(self.stored.get(place, {}).get(name)))

    def values(self) -> dict[str, Any]:
        cleaned = super().values()
        targets = dict(self.stored)
        for place, names in self.places:
            given = {name: cleaned.get(f"target_{place}_{name}", "").strip() for name in names}
            before = self.stored.get(place, {})
            others = {name: value for name, value in before.items() if name not in names}
            targets[place] = {**others, **merge_secrets(before, given)}
        cleaned["targets"] = {name: target for name, target in targets.items() if target}
        if cleaned["targets"] or not isinstance(self.instance.targets, Sealed):
            self.targets = cleaned["targets"]
        return cleaned

    def find_error_field(self, path: str) -> str | None:
        root, _dot, rest = path.partition(".")
        if root == "targets":
            place, _dot, name = rest.rpartition(".")
            for field in (f"target_{place}_{name}", f"target_{rest}_url"):
                if field in self.fields:
                    return field
        return super().find_error_field(path)


@admin.register(Community)
class CommunityAdmin(Retirable):
    form = CommunityForm
    list_display = ("chat_id", "name", "shown_targets")
    search_fields = ("chat_id", "name")
    fixed_fields = ("chat_id",)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        stored = get_readable_secrets(obj.targets) if obj else {}
        sealed = obj is not None and isinstance(obj.targets, Sealed)
        sections: list[Any] = [(None, {"fields": ("chat_id", "name"), "description": SEALED if sealed else None})]
        for place, names in list_targets(stored):
            fields = [tuple(f"target_{place}_{name}" for name in names)]
            title = KIND_LABELS.get(place) or gettext("channel %s") % place
            sections.append((title, {"fields": fields, "classes": [] if place in stored else ["collapse"]}))
        return sections

    def in_use(self, row: Community) -> bool:
        """Always in use: events and touches refer to a community by its chat id."""
        return True

    @ops_display(description=_("targets"))
    def shown_targets(self, row: Community) -> str:
        if isinstance(row.targets, Sealed):
            return gettext("Secrets cannot be decrypted here")
        return ", ".join(f"{KIND_LABELS.get(name, name)} {MASK}" for name in row.targets) or "–"
