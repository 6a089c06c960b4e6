"""Pages of groups and failed logins. Users are in `admin.people`."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.admin import GroupAdmin
from django.contrib.auth.models import Group
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin

from scheduling.admin.base import DeclaredLookups, OpsAdmin, ops_action, ops_display
from scheduling.admin.labels import TranslatedPermissions
from scheduling.models import FailedLogin

admin.site.unregister(Group)


@admin.register(Group)
class RoleAdmin(DeclaredLookups, TranslatedPermissions, GroupAdmin, ModelAdmin):  # type: ignore[misc]
    pass


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

    @ops_display(description=_("user"))
    def who(self, row: FailedLogin) -> str:
        return str(row.user) if row.user else gettext("no such user")

    @ops_action(description=_("Unlock"), permissions=["delete"])
    def unlock(self, request: HttpRequest, chosen: QuerySet[FailedLogin]) -> None:
        for row in chosen:
            self.log_deletions(request, FailedLogin.objects.filter(pk=row.pk))
        chosen.delete()
        messages.success(request, gettext("Unlocked. The user can log in again."))
