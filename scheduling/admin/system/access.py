"""Pages of API keys, groups and permissions, and of the audit log."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.apps import apps
from django.contrib import admin, messages
from django.contrib.auth.admin import GroupAdmin
from django.contrib.auth.models import Group
from django.core.validators import MinValueValidator
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin
from unfold.contrib.filters.admin import ChoicesDropdownFilter
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget

from scheduling.admin.base import (
    BigTable,
    Confirmation,
    OpsAdmin,
    OpsPages,
    ReadOnlyAdmin,
    ops_action,
    ops_display,
    row_action,
)
from scheduling.admin.labels import TranslatedPermissions
from scheduling.admin.lists import ColumnFilter, ListExportMixin, SpanFilter
from scheduling.admin.row_edits import OptimisticLockForm
from scheduling.admin.shown_values import render_link, render_tag
from scheduling.models import ApiKey, AuditEntry, FailedLogin, Scope
from scheduling.operations import commands


class ApiKeyForm(OptimisticLockForm):
    scopes = forms.MultipleChoiceField(
        label=_("scopes"), choices=Scope.choices, widget=UnfoldAdminCheckboxSelectMultipleWidget,
        help_text=_("Operations that the key allows. Grant only what the client needs."),
    )  # fmt: skip

    class Meta:
        model = ApiKey
        fields: ClassVar[Any] = ("name", "scopes", "rate_per_minute", "expires_at")
        help_texts: ClassVar[Any] = {
            "name": _("The system that uses the key."),
            "rate_per_minute": _("Empty: default limit."),
            "expires_at": _("Empty: never."),
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["rate_per_minute"].validators.append(MinValueValidator(1))


@admin.register(ApiKey)
class ApiKeyAdmin(OpsAdmin):
    form = ApiKeyForm
    list_display = ("name", "begins_with", "scope_names", "shown_state", "expires_at", "created_at")
    search_fields = ("name", "prefix")
    readonly_fields = ("begins_with", "created_at", "revoked_at")
    actions_detail = ("revoke",)
    forbidden = frozenset({"delete"})  # the history names the users of revoked keys

    def layout(self, request: HttpRequest, obj: Any) -> list[Any]:
        fields = ("name", "scopes", "rate_per_minute", "expires_at")
        return [(None, {"fields": fields if obj is None else (*fields, "begins_with", "created_at", "revoked_at")})]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        if change:
            super().save_model(request, obj, form, change)
            return
        given = form.cleaned_data
        obj.shown_once = commands.create_api_key(
            given["name"],
            given["scopes"],
            rate_per_minute=given["rate_per_minute"],
            expires_at=given["expires_at"],
            actor=request.user.get_username(),
        )
        obj.pk = ApiKey.objects.get(name=given["name"]).pk

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> HttpResponse:
        """Show the key on the page itself. A message would travel in a cookie."""
        page = self.page(
            request, "ops/api_key.html", gettext("The new API key"), key=obj.shown_once, original=obj,
            back=self.url("changelist"),
        )  # fmt: skip
        page["Cache-Control"] = "no-store"
        return page

    @ops_display(description=_("prefix"))
    def begins_with(self, row: ApiKey) -> str:
        return f"{row.prefix}…"

    @ops_display(description=_("scopes"))
    def scope_names(self, row: ApiKey) -> str:
        labels = dict(Scope.choices)
        return ", ".join(str(labels.get(scope, scope)) for scope in row.scopes)

    @ops_display(description=_("state"))
    def shown_state(self, row: ApiKey) -> SafeString:
        if row.revoked_at:
            return render_tag(gettext("Revoked"), "danger")
        if row.expires_at and row.expires_at <= now():
            return render_tag(gettext("Expired"), "warning")
        return render_tag(gettext("Valid"), "success")

    @row_action(_("Revoke"), icon="key_off", permission="change", allowed=lambda row: row.revoked_at is None)
    def revoke(self, request: HttpRequest, row: ApiKey) -> Confirmation:
        return Confirmation(
            title=gettext("Revoke the key “%(name)s”?") % {"name": row.name}, button=gettext("Revoke"), danger=True,
            text=gettext("Requests with this key are rejected at once. This cannot be undone."),
            act=lambda: bool(ApiKey.objects.filter(pk=row.pk, revoked_at=None).update(revoked_at=Now())),
            logged=gettext("Revoked."), done=gettext("The key was revoked."),
        )  # fmt: skip


admin.site.unregister(Group)


@admin.register(Group)
class RoleAdmin(OpsPages, TranslatedPermissions, GroupAdmin, ModelAdmin):  # type: ignore[misc]
    form = OptimisticLockForm


@admin.register(FailedLogin)
class FailedLoginAdmin(OpsAdmin):
    list_display = ("who", "address", "tries", "last_at")
    search_fields = ("user__username", "address")
    actions = ("unlock",)
    forbidden = frozenset({"add", "change"})

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).filter(tries__gt=0).select_related("user")

    @ops_display(description=_("user"))
    def who(self, row: FailedLogin) -> str:
        return str(row.user) if row.user else gettext("no such user")

    def get_actions(self, request: HttpRequest) -> Any:
        return {name: each for name, each in super().get_actions(request).items() if name != "delete_selected"}

    @ops_action(description=_("Unlock"), permissions=["delete"])
    def unlock(self, request: HttpRequest, chosen: QuerySet[FailedLogin]) -> None:
        self.log_deletions(request, chosen)
        chosen.delete()
        messages.success(request, gettext("Unlocked. The user can log in again."))


def name_kind(kind: str) -> str:
    """Return the verbose name of a model by its label; the label of a model that no longer exists."""
    try:
        return str(capfirst(apps.get_model(kind)._meta.verbose_name))
    except (LookupError, ValueError):
        return kind


class KindFilter(ColumnFilter):
    """Offer the kinds that pages exist for."""

    title = _("kind")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return sorted(
            ((model._meta.label_lower, name_kind(model._meta.label_lower)) for model in admin.site._registry),
            key=lambda each: str(each[1]),
        )


def describe_changes(row: AuditEntry) -> list[str]:
    return [f"{name}: {_shorten_value(before)} → {_shorten_value(after)}" for name, before, after in row.changes]


def _shorten_value(value: str | None) -> str:
    text = "–" if value in (None, "") else str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


ALARMING_ACTIONS = ("deleted", "login_failed", "erased")


@admin.register(AuditEntry)
class AuditEntryAdmin(ListExportMixin, BigTable, ReadOnlyAdmin):
    list_display = ("at", "who", "action_label", "kind_name", "target", "summary", "address")
    list_display_links = ("at",)
    list_filter = (("action", ChoicesDropdownFilter), KindFilter, ("at", SpanFilter))
    search_fields = ("actor",)
    search_help_text = _("Name of a user, API key or object, or an id")
    fields = ("at", "who", "address", "action_label", "kind_name", "target", "reason", "all_changes")
    export_columns = (
        (_("at"), lambda row: row.at), (_("who"), lambda row: row.actor), (_("address"), lambda row: row.address),
        (_("action"), lambda row: row.get_action_display()), (_("kind"), lambda row: name_kind(row.kind)),
        (_("object id"), lambda row: row.object_id), (_("object"), lambda row: row.label),
        (_("reason"), lambda row: row.reason), (_("changes"), lambda row: "; ".join(describe_changes(row))),
    )  # fmt: skip

    def has_export_permission(self, request: HttpRequest) -> bool:
        return bool(self.has_view_permission(request))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[AuditEntry], search_term: str
    ) -> tuple[QuerySet[AuditEntry], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        found = Q(actor=term) | Q(actor=f"api:{term}") | Q(object_id=term) | Q(label__icontains=term)
        return queryset.filter(found), False

    @ops_display(description=_("who"), ordering="actor")
    def who(self, row: AuditEntry) -> str:
        return row.actor or gettext("System or configuration file")

    @ops_display(description=_("action"))
    def action_label(self, row: AuditEntry) -> SafeString:
        return render_tag(row.get_action_display(), "danger" if row.action in ALARMING_ACTIONS else "")

    @ops_display(description=_("kind"))
    def kind_name(self, row: AuditEntry) -> str:
        return name_kind(row.kind)

    @ops_display(description=_("object"))
    def target(self, row: AuditEntry) -> str:
        text = row.label or row.object_id
        try:
            url = reverse(f"admin:{row.kind.replace('.', '_')}_change", args=[row.object_id])
        except NoReverseMatch:
            return text
        return render_link(url, text)

    @ops_display(description=_("summary"))
    def summary(self, row: AuditEntry) -> str:
        return " · ".join([*filter(None, [row.reason]), *describe_changes(row)[:3]])

    @ops_display(description=_("changes"))
    def all_changes(self, row: AuditEntry) -> str:
        return format_html_join("", "<div>{}: {} → {}</div>", ((name, *values) for name, *values in row.changes)) or "–"
