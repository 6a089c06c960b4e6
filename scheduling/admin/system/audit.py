"""The page of the audit log: who did what, when, from where, with values before and after."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html, format_html_join
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.contrib.filters.admin import ChoicesDropdownFilter, DropdownFilter

from scheduling.admin.base import BigTable, ReadOnlyAdmin, ops_display
from scheduling.admin.list_export import ListExportMixin
from scheduling.admin.touches.touch import SpanFilter
from scheduling.models import AuditEntry


def name_kind(kind: str) -> str:
    """Return the verbose name of a model by its label; the label of a model that no longer exists."""
    try:
        return str(capfirst(apps.get_model(kind)._meta.verbose_name))
    except (LookupError, ValueError):
        return kind


class KindFilter(DropdownFilter):  # type: ignore[misc]
    """Offer the kinds that pages exist for."""

    title = _("kind")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return sorted(
            ((model._meta.label_lower, name_kind(model._meta.label_lower)) for model in admin.site._registry),
            key=lambda each: str(each[1]),
        )

    def queryset(self, request: HttpRequest, queryset: QuerySet[AuditEntry]) -> QuerySet[AuditEntry]:
        return queryset.filter(kind=self.value()) if self.value() else queryset


def describe_changes(row: AuditEntry) -> list[str]:
    return [f"{name}: {_shorten_value(before)} → {_shorten_value(after)}" for name, before, after in row.changes]


def _shorten_value(value: str | None) -> str:
    text = "–" if value in (None, "") else str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


#: Unfold shows the stored value of an action that has no tone.
TONES = dict.fromkeys(AuditEntry.Action.values, "default") | dict.fromkeys(
    ("deleted", "login_failed", "erased"), "danger"
)


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

    @ops_display(description=_("action"), label=TONES)
    def action_label(self, row: AuditEntry) -> tuple[str, str]:
        return row.action, row.get_action_display()

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
        return format_html('<a class="at-link" href="{}">{}</a>', url, text)

    @ops_display(description=_("summary"))
    def summary(self, row: AuditEntry) -> str:
        return " · ".join([*filter(None, [row.reason]), *describe_changes(row)[:3]])

    @ops_display(description=_("changes"))
    def all_changes(self, row: AuditEntry) -> str:
        return format_html_join("", "<div>{}: {} → {}</div>", ((name, *values) for name, *values in row.changes)) or "–"
