"""Pages of users: role and status first, single rights folded."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import User
from django.http import HttpRequest
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin, TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm
from unfold.widgets import UnfoldAdminSelectWidget

from scheduling.admin.base import Confirmation, DeclaredLookups, OpsPages, ops_display, row_action
from scheduling.admin.labels import TranslatedPermissions
from scheduling.identity import totp
from scheduling.identity.invitations import SHORT_LABELS, assign_roles, find_role
from scheduling.models import IdentityLink, Role

admin.site.unregister(User)


class PersonForm(UserChangeForm):  # type: ignore[misc]
    role = forms.ChoiceField(
        label=_("role"), choices=[("", _("A selection of single rights")), *Role.choices], required=False,
        widget=UnfoldAdminSelectWidget,
        help_text=_("A new role replaces the old one and gives access to the back office."),
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "role" in self.fields:
            self.fields["role"].initial = find_role(self.instance)
            self.fields["role"].label = capfirst(self.fields["role"].label)


class NewPersonForm(UserCreationForm):  # type: ignore[misc]
    role = forms.ChoiceField(label=_("role"), choices=Role.choices, widget=UnfoldAdminSelectWidget)


class IdentityLinkForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = IdentityLink
        fields: ClassVar[Any] = ("subject",)

    def clean_subject(self) -> str:
        subject = str(self.cleaned_data["subject"])
        self.instance.issuer = settings.AFTERTOUCH_OIDC_ISSUER
        same = IdentityLink.objects.filter(issuer=self.instance.issuer, subject=subject).exclude(pk=self.instance.pk)
        if same.exists():
            raise forms.ValidationError(gettext("Another user is linked with this subject."))
        return subject


class IdentityLinkInline(TabularInline):  # type: ignore[misc]
    """The link with the provider, which only administrators set: its holder signs in as this user."""

    model = IdentityLink
    form = IdentityLinkForm
    extra = 0

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(settings.AFTERTOUCH_OIDC_ISSUER and request.user.is_superuser)

    has_add_permission = has_change_permission = has_delete_permission = has_view_permission


@admin.register(User)
class PersonAdmin(OpsPages, DeclaredLookups, TranslatedPermissions, UserAdmin, ModelAdmin):  # type: ignore[type-arg, misc]
    form = PersonForm
    add_form = NewPersonForm
    change_password_form = AdminPasswordChangeForm
    inlines = (IdentityLinkInline,)
    list_display = ("username", "full_name", "role_name", "second_factor", "is_active", "last_login")
    actions_detail = ("reset_second_factor",)
    readonly_fields = ("second_factor_state", "last_login", "date_joined")
    fieldsets = (
        (None, {"fields": ("username", "role", "is_active", "second_factor_state", "password")}),
        (_("Personal info"), {"fields": ("first_name", "last_name", "email")}),
        (
            _("Single rights, for experts"),
            {"classes": ("collapse",), "fields": ("is_staff", "is_superuser", "groups", "user_permissions")},
        ),
        (_("Important dates"), {"fields": ("last_login", "date_joined")}),
    )
    add_fieldsets = (
        (None, {"classes": ("wide",), "fields": ("username", "role", "usable_password", "password1", "password2")}),
    )

    def get_queryset(self, request: HttpRequest) -> Any:
        found = super().get_queryset(request).select_related("totp_device")
        return found.prefetch_related("groups", "user_permissions")

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Store the role after the single rights, which it replaces."""
        super().save_related(request, form, formsets, change)
        role = form.cleaned_data.get("role")
        if role and (not change or "role" in form.changed_data):
            form.instance.user_permissions.clear()
            assign_roles(form.instance, [role], by=request.user.get_username())

    @ops_display(description=_("full name"))
    def full_name(self, row: User) -> str:
        return row.get_full_name() or "–"

    @ops_display(description=_("role"))
    def role_name(self, row: User) -> str:
        role = find_role(row)
        if not row.is_staff:
            return gettext("No access to the back office")
        return str(SHORT_LABELS[role]) if role else gettext("Single rights")

    @ops_display(description=_("second factor"), label={"on": "success", "off": "info"})
    def second_factor(self, row: User) -> tuple[str, str]:
        device = getattr(row, "totp_device", None)
        return ("on", gettext("On")) if device and device.confirmed_at else ("off", gettext("Off"))

    @ops_display(description=_("second factor"))
    def second_factor_state(self, row: User) -> str:
        return str(self.second_factor(row)[1])

    @row_action(
        _("Reset the second factor"), icon="phonelink_erase", permission="change",
        allowed=lambda row: hasattr(row, "totp_device"),
    )  # fmt: skip
    def reset_second_factor(self, request: HttpRequest, row: User) -> Confirmation:
        def act() -> None:
            if totp.reset_totp(row):
                self.log_change(request, row, gettext("Reset the second factor."))

        return Confirmation(
            title=gettext("Reset the second factor of “%(name)s”?") % {"name": row}, button=gettext("Reset"),
            text=gettext("The authenticator app and the recovery codes stop working. The password stays."), danger=True,
            act=act, done=gettext("The second factor is off. The user can set up a new one."),
        )  # fmt: skip
