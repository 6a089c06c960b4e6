"""Admin pages of platforms, and the pause buttons and browser settings that shops share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.timezone import now
from django.utils.translation import gettext, gettext_lazy, pgettext
from django.utils.translation import gettext_lazy as _
from unfold.widgets import UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from rpa_tasks.browser_settings import (
    ALLOWED_FLAGS,
    LISTS,
    SECRETS,
    SETTINGS,
    needs_new_password,
    normalize_address,
)
from rpa_tasks.configuration import check_platform
from rpa_tasks.jobs import shops
from rpa_tasks.jobs.queries import count_platform_backlogs
from rpa_tasks.models import RUN_JOBS, Breaker, Platform, Shop
from scheduling.admin.base import (
    CheckedForm,
    Confirmation,
    HistoryAdmin,
    OpsAdmin,
    Retirable,
    ops_display,
    row_action,
)
from scheduling.admin.form_fields import (
    SEALED,
    NamesField,
    SecretField,
    TextLikeField,
    get_readable_secrets,
    merge_secrets,
)
from scheduling.admin.labels import translate_reason
from scheduling.admin.shown_values import format_instant, insert_values, render_tag
from scheduling.models.encrypted import Sealed

LABELS = {
    "language": (_("language"), _("Like zh-CN. Pages see it; empty: the server's.")),
    "timezone": (_("time zone"), _("Like Asia/Shanghai. Pages see it; empty: the server's.")),
    "window": (_("window size"), _("Like 1366x768.")),
    "downloads": (_("download folder"), _("Name of the folder in a run's directory; empty: Downloads.")),
    "flags": (_("more flags"), _("One a line. Allowed: %(flags)s")),
    "extensions": (_("extensions"), _(
        "Names of folders in AFTERTOUCH_RPA_EXTENSIONS_DIR of the execution nodes, one a line. A run does not start "
        "where one is missing."
    )),
    "proxy_url": (_("proxy"), _(
        "Like http://proxy.example:8080 or socks5://proxy.example:1080. A run starts only if the echo page "
        "sees another address than that of the node. “direct” in a shop: no proxy, whatever its platform has."
    )),
    "cdp_url": (_("browser elsewhere"), _(
        "DevTools address of a browser that you run, like http://10.0.0.5:9222; no other shop may use it. A platform's "
        "has {shop_id} in it. “own” in a shop: a browser of the pool. The other settings have no effect on it."
    )),
}  # fmt: skip
SECRET_NAMES = {"username": _("user name at the proxy"), "password": _("password at the proxy")}


class FlagsField(NamesField):
    """Flags, one a line: a value may have commas."""

    def to_python(self, value: Any) -> Any:
        lines = map(str.strip, (TextLikeField.to_python(self, value) or "").splitlines())
        return list(dict.fromkeys(filter(None, lines)))


class BrowserForm(CheckedForm):
    """Form of a row with browser settings, which it stores as members of two columns."""

    written_columns = ("browser", "proxy_secret")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, (label, text) in LABELS.items():
            kind: Any = FlagsField if name in LISTS else forms.CharField
            widget = UnfoldAdminTextareaWidget(attrs={"rows": 3}) if name in LISTS else UnfoldAdminTextInputWidget()
            shown = text % {"flags": ", ".join(sorted(ALLOWED_FLAGS))} if name == "flags" else text
            field = kind(label=label, help_text=shown, required=False, widget=widget)
            field.initial = self.instance.browser.get(name, [] if name in LISTS else "")
            self.fields[f"browser_{name}"] = field
        self.stored = get_readable_secrets(self.instance.proxy_secret)
        for name, label in SECRET_NAMES.items():
            self.fields[f"secret_{name}"] = SecretField(name, bool(self.stored.get(name)))
            self.fields[f"secret_{name}"].label = label

    def values(self) -> dict[str, Any]:
        cleaned = super().values()
        given = {name: cleaned.pop(f"browser_{name}", None) for name in SETTINGS}
        given["cdp_url"] = normalize_address(given["cdp_url"] or "")
        typed = {name: cleaned.pop(f"secret_{name}", "").strip() for name in SECRETS}
        self.browser = {name: value for name, value in given.items() if value}
        self.proxy_secret: Any = self.instance.proxy_secret
        again = needs_new_password(self.instance, given.get("proxy_url") or "") and not all(typed.values())
        if again and "secret_password" not in self.errors:
            self.add_error("secret_password", _("Enter user name and password again for another proxy."))
        if any(typed.values()) or not isinstance(self.proxy_secret, Sealed):
            self.proxy_secret = merge_secrets(self.stored, typed)
        secrets = get_readable_secrets(self.proxy_secret)
        return (
            cleaned
            | {f"browser.{path}": given[name] for name, path in SETTINGS.items()}
            | {f"browser.{path}": secrets.get(name, "") for name, path in SECRETS.items()}
        )

    def find_error_field(self, path: str) -> str | None:
        fields = {f"browser.{inner}": f"browser_{name}" for name, inner in SETTINGS.items()}
        fields |= {f"browser.{inner}": f"secret_{name}" for name, inner in SECRETS.items()}
        return fields.get(path) or super().find_error_field(path)


def browser_section(row: Any) -> tuple[Any, dict[str, Any]]:
    """Return the fieldset of the browser, for a form that is a `BrowserForm`."""
    fields = (
        ("browser_language", "browser_timezone"), ("browser_window", "browser_downloads"), "browser_proxy_url",
        ("secret_username", "secret_password"), "browser_flags", "browser_extensions", "browser_cdp_url",
    )  # fmt: skip
    section: dict[str, Any] = {"fields": fields, "classes": ["collapse"]}
    if row is not None and isinstance(row.proxy_secret, Sealed):
        section["description"] = SEALED
    return _("Browser"), section


class Pausing(OpsAdmin):
    """Pause and resume as buttons instead of form fields: saving an old form must not start or stop jobs."""

    #: Called with primary key and `by=` the user. They return False if nothing changed.
    pauses: ClassVar[Callable[..., bool]]
    resumes: ClassVar[Callable[..., bool]]

    @ops_display(description=gettext_lazy("state"))
    def shown_state(self, row: Any) -> str:
        if row.retired_at:
            return render_tag(gettext("Retired"))
        return render_tag(gettext("Paused"), "warning") if row.paused else render_tag(gettext("In use"), "success")

    @row_action(
        gettext_lazy("Pause"), icon="pause_circle", permission="scheduling.add_pause",
        allowed=lambda row: not row.paused and not row.retired_at,
    )  # fmt: skip
    def pause_row(self, request: HttpRequest, row: Any) -> Confirmation:
        return Confirmation(
            title=gettext("Pause “%(what)s”?") % {"what": row}, button=gettext("Pause"),
            text=gettext("No new job starts. Running jobs continue to their end; newly published jobs wait."),
            act=lambda: type(self).pauses(row.pk, by=request.user.get_username()), done=gettext("Paused."),
            refused=translate_reason("retired"),
        )  # fmt: skip

    @row_action(
        gettext_lazy("Resume"), icon="play_circle", permission="scheduling.delete_pause",
        allowed=lambda row: row.paused and not row.retired_at,
    )  # fmt: skip
    def resume_row(self, request: HttpRequest, row: Any) -> Confirmation:
        return Confirmation(
            title=gettext("Resume “%(what)s”?") % {"what": row}, button=gettext("Resume"),
            text=gettext("Waiting jobs start as soon as a node is free."),
            act=lambda: type(self).resumes(row.pk, by=request.user.get_username()), done=gettext("Resumed."),
            refused=translate_reason("retired"),
        )  # fmt: skip


class PlatformForm(BrowserForm):
    class Meta:
        model = Platform
        exclude = ("version", "retired_at", "paused", *BrowserForm.written_columns)
        help_texts: ClassVar[Any] = {
            "key": _("Like pdd, temu or tiktok; part of the flows' names."),
            "dedicated_queue": _("Jobs go to the queues p.KEY.high, .normal and .low, dots as “:”, instead of the "
                                 "shared ones. A node must consume them."),
            "backlog_limit": _("Queue limit: further jobs are rejected while this number waits."),
            "waits_for_home": _("Jobs with a browser wait for the node that has the shop's browser profile. Otherwise "
                                "the first node with room takes them, and the shop may need a login there."),
            "breaker_threshold": _("Number of consecutive platform errors after which the breaker opens for all "
                                   "shops of the platform."),
            "check_task_type": _("Task type of a flow of this platform that finds out whether a shop is logged in. It "
                                 "runs after an operator reports a login. Empty: the report is believed."),
        }  # fmt: skip

    def check(self, values: Any, /) -> None:
        stored = self.instance if self.instance.pk else None
        flows = stored.flows.filter(retired_at=None) if stored else ()
        all_shops = Shop.objects.select_related("platform")
        check_platform({"key": self.instance.key} | values, {flow.task_type for flow in flows}, stored, all_shops)


def breaker_tag(breaker: Breaker) -> tuple[str, str]:
    """Return tone and text for the state of the breaker."""
    if breaker.open_until is None:
        if breaker.errors:
            return "warning", gettext("closed, %(count)s errors in a row") % {"count": breaker.errors}
        return "success", pgettext("circuit breaker", "closed")
    if breaker.open_until > now():
        return "danger", insert_values(gettext("open until %(time)s"), time=format_instant(breaker.open_until))
    if breaker.probe:
        return "warning", gettext("half open, one run tries")
    return "warning", gettext("half open, the next run tries")


@admin.register(Platform)
class PlatformAdmin(Pausing, HistoryAdmin, Retirable):
    form = PlatformForm
    list_display = (
        "name_or_key", "key", "shown_state", "breaker_state", "shop_count", "waiting_count", "running_count",
    )  # fmt: skip
    list_select_related = ("breaker",)
    search_fields = ("key", "name")
    readonly_fields = ("shown_state", "breaker_state", "breaker_story", "version")
    fixed_fields = ("key",)
    actions_detail = ("close_breaker", "pause_row", "resume_row", "retire", "bring_back")
    pauses = staticmethod(shops.pause_platform)
    resumes = staticmethod(shops.resume_platform)

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        limits = ("backlog_limit", "breaker_threshold")
        fields = ("key", "name", "dedicated_queue", limits, "waits_for_home", "check_task_type")
        if obj is None:
            return [(None, {"fields": (*fields, "change_reason")}), browser_section(obj)]
        return [
            (_("Now"), {"fields": ("shown_state", "breaker_state", "breaker_story")}),
            (_("Settings"), {"fields": fields}),
            browser_section(obj),
            (_("Life"), {"fields": ("version", "change_reason")}),
        ]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Platform]:
        rows: QuerySet[Platform] = super().get_queryset(request)
        return rows.annotate(
            shops_living=Count("shops", filter=Q(shops__retired_at=None), distinct=True),
            jobs_running=Count("shops__lane", filter=Q(shops__lane__task_id__isnull=False), distinct=True),
        )

    def load_rows(self, rows: Iterable[Any]) -> None:
        backlogs = count_platform_backlogs()
        for row in rows:
            row.backlog = backlogs.get(row.pk, 0)

    def in_use(self, row: Platform) -> bool:
        return row.shops.exists() or row.flows.exists()

    def explain_retirement_block(self, row: Platform) -> str:
        """Return "": the shops and flows of a retired platform stop with it."""
        return ""

    @ops_display(description=_("circuit breaker"))
    def breaker_state(self, row: Platform) -> str:
        tone, words = breaker_tag(row.breaker)
        return render_tag(words, tone)

    @ops_display(description=_("detail"))
    def breaker_story(self, row: Platform) -> str:
        breaker = row.breaker
        if breaker.opened_at is None:
            return "–"
        words = gettext("opened at %(time)s, %(count)s times in a row, after %(errors)s errors")
        return insert_values(
            words, time=format_instant(breaker.opened_at), count=breaker.openings, errors=breaker.errors
        )

    @ops_display(description=_("shops"))
    def shop_count(self, row: Any) -> str:
        link = f"{reverse('admin:rpa_tasks_shop_changelist')}?platform__id__exact={row.pk}"
        return format_html('<a class="at-link" href="{}">{}</a>', link, row.shops_living)

    @ops_display(description=_("waiting jobs"))
    def waiting_count(self, row: Any) -> str:
        text = f"{row.backlog} / {row.backlog_limit}"
        return format_html('<span class="at-bad">{}</span>', text) if row.backlog >= row.backlog_limit else text

    @ops_display(description=_("running"))
    def running_count(self, row: Any) -> int:
        return int(row.jobs_running)

    @row_action(
        _("Close the breaker now"), icon="lock_open_right", permission=RUN_JOBS,
        allowed=lambda row: row.breaker.open_until or row.breaker.errors,
    )  # fmt: skip
    def close_breaker(self, request: HttpRequest, row: Platform) -> Confirmation:
        return Confirmation(
            title=gettext("Close the breaker of “%(what)s”?") % {"what": row}, button=gettext("Close the breaker"),
            text=gettext("The shops run again at once. If the platform still blocks runs, the breaker opens "
                "again after %(count)s consecutive errors.") % {"count": row.breaker_threshold},
            act=lambda: shops.close_breaker(row.pk, by=request.user.get_username()),
            done=gettext("The breaker is closed; its shops run again."),
            unchanged=gettext("The breaker was already closed."), refused=translate_reason("retired"),
        )  # fmt: skip
