from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from unfold.decorators import display

from scheduling.admin.base import BigTable, CheckedForm, OpsAdmin
from scheduling.admin.form_fields import SettingsField
from scheduling.admin.labels import complaint
from scheduling.admin.touches.customer_page import customer_context
from scheduling.configuration.validation import is_time_zone
from scheduling.models import Customer
from scheduling.operations import commands
from scheduling.redaction import masked


class CustomerForm(CheckedForm):
    check = staticmethod(lambda values: None)

    addresses = SettingsField(label=_("addresses"), help_text=_("One a line: “email: ann@example.com”, “inapp: u1”."))

    class Meta:
        model = Customer
        fields: ClassVar[Any] = ("user_id", "name", "level", "locale", "timezone", "addresses", "opted_out")
        help_texts: ClassVar[Any] = {
            "level": _("Like vip or normal; the delay rule goes by it."),
            "opted_out": _("No marketing content; service content still goes out."),
        }

    def clean_timezone(self) -> str:
        zone = self.cleaned_data["timezone"]
        if zone and not is_time_zone(zone):
            raise forms.ValidationError(complaint(f"“{zone}” is not an IANA time zone"))
        return str(zone)


@admin.register(Customer)
class CustomerAdmin(BigTable, OpsAdmin):
    form = CustomerForm
    list_display = ("user_id", "name", "level", "locale", "opted_out", "last_active_at")
    list_filter = ("level", "opted_out")
    ordering = ("-pk",)
    search_fields = ("user_id",)
    search_help_text = _("User id (or how it begins), or the full name")
    readonly_fields = ("opted_out_at", "last_active_at", "conversation_at", "created_at")
    shown_as: ClassVar[dict[str, str]] = {"addresses": "addresses_text"}
    fieldsets = (
        (None, {"fields": (("user_id", "name"), "level", ("locale", "timezone"), "addresses")}),
        (_("Consent"), {"fields": (("opted_out", "opted_out_at"),)}),
        (_("Behaviour"), {"fields": ("last_active_at", "conversation_at", "created_at")}),
    )
    change_form_outer_before_template = "ops/customer_now.html"
    change_form_outer_after_template = "ops/customer_touches.html"
    list_filter_submit = False

    def get_list_filter(self, request: HttpRequest) -> Any:
        """Not by level: its choices would be read from the whole table."""
        return ("opted_out",)

    def get_readonly_fields(self, request: HttpRequest, obj: Customer | None = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        return [*fields, "user_id"] if obj else fields

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Customer], search_term: str
    ) -> tuple[QuerySet[Customer], bool]:
        term = search_term.strip()
        return (queryset.filter(Q(user_id__startswith=term) | Q(name=term)) if term else queryset), False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """What was sent to a customer stays readable."""
        return False

    def save_model(self, request: HttpRequest, obj: Customer, form: Any, change: bool) -> None:
        names = form.changed_data if change else [name for name in form.cleaned_data if name != "user_id"]
        changes = {name: form.cleaned_data[name] for name in names if name in CustomerForm.Meta.fields}
        obj.pk = commands.put_customer(obj.user_id, changes).pk

    def change_view(self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None) -> Any:
        row = self.get_object(request, unquote(object_id))
        context = customer_context(request, row) if row else {}
        return super().change_view(request, object_id, form_url, {**context, **(extra_context or {})})

    @display(description=_("addresses"))  # type: ignore[untyped-decorator]
    def addresses_text(self, row: Customer) -> str:
        return SettingsField().write(masked(row.addresses))
