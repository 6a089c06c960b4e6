"""Pages of users, groups and failed logins in Unfold's style, and the login form."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.admin import GroupAdmin, UserAdmin
from django.contrib.auth.models import Group, User
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin
from unfold.decorators import action, display
from unfold.forms import AdminPasswordChangeForm, AuthenticationForm, UserChangeForm, UserCreationForm

from scheduling.admin.base import DeclaredLookups, OpsAdmin
from scheduling.admin.labels import TranslatedPermissions
from scheduling.models import FailedLogin
from scheduling.web import login_lockout

admin.site.unregister(User)
admin.site.unregister(Group)


@admin.register(User)
class PersonAdmin(DeclaredLookups, TranslatedPermissions, UserAdmin, ModelAdmin):  # type: ignore[type-arg, misc]
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm


@admin.register(Group)
class RoleAdmin(DeclaredLookups, TranslatedPermissions, GroupAdmin, ModelAdmin):  # type: ignore[misc]
    pass


class LoginForm(AuthenticationForm):  # type: ignore[misc]
    """Show a lockout after too many wrong passwords. The text is the same for unknown users."""

    def get_invalid_login_error(self) -> ValidationError:
        minutes = login_lockout.locked_minutes(self.request)
        if not minutes:
            return super().get_invalid_login_error()  # type: ignore[no-any-return]
        text = ngettext(
            "Too many failed logins with this name from where you are. Try again in %(minutes)s minute, or ask an "
            "administrator to unlock it.",
            "Too many failed logins with this name from where you are. Try again in %(minutes)s minutes, or ask an "
            "administrator to unlock it.",
            minutes,
        )
        return ValidationError(text % {"minutes": minutes}, code="locked")


admin.site.login_form = LoginForm


@admin.register(FailedLogin)
class FailedLoginAdmin(OpsAdmin):
    list_display = ("who", "address", "tries", "last_at")
    search_fields = ("user__username", "address")
    actions = ("unlock",)

    def get_queryset(self, request: HttpRequest) -> Any:
        return super().get_queryset(request).filter(tries__gt=0).select_related("user")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @display(description=_("user"))  # type: ignore[untyped-decorator]
    def who(self, row: FailedLogin) -> str:
        return str(row.user) if row.user else gettext("no such user")

    @action(description=_("Unlock"), permissions=["delete"])  # type: ignore[untyped-decorator]
    def unlock(self, request: HttpRequest, chosen: QuerySet[FailedLogin]) -> None:
        for row in chosen:
            self.log_deletions(request, FailedLogin.objects.filter(pk=row.pk))
        chosen.delete()
        messages.success(request, gettext("Unlocked. The user can log in again."))
