"""Read and assign the roles of users."""

from __future__ import annotations

from collections.abc import Iterable

from django.contrib.auth.models import Group, User
from django.utils.translation import gettext_lazy as _

from scheduling.audit.audit_log import record_action
from scheduling.models import Role

SHORT_LABELS = {
    "viewer": _("Viewer"),
    "operator": _("Operator"),
    "editor": _("Editor"),
    "command editor": _("Command editor"),
    "administrator": _("Administrator"),
}
GROUPS = tuple(role.value for role in Role if role != Role.ADMINISTRATOR)


def find_role(user: User) -> str:
    """Return the role of a user; "" for no role, or for a selection of rights that is none."""
    if user.is_superuser:
        return Role.ADMINISTRATOR.value
    groups = [group.name for group in user.groups.all()]
    own_rights = user.user_permissions.all()
    return groups[0] if len(groups) == 1 and groups[0] in GROUPS and not own_rights else ""


def assign_roles(user: User, roles: Iterable[str], *, by: str = "") -> None:
    """Give a stored user these roles in place of other roles, and staff status. Groups that are no role stay.

    Idempotent. A change is recorded in the audit log with the name of the user who gave the roles.
    """
    wanted, before = set(roles), _describe_roles(user)
    user.is_staff, user.is_superuser = True, Role.ADMINISTRATOR.value in wanted
    user.save(update_fields=["is_staff", "is_superuser"])
    user.groups.remove(*Group.objects.filter(name__in=set(GROUPS) - wanted))
    user.groups.add(*(Group.objects.get_or_create(name=role)[0] for role in GROUPS if role in wanted))
    if (after := _describe_roles(user)) != before:
        record_action("changed", user, label=user.get_username(), actor=by, changes=[("role", before, after)])


def _describe_roles(user: User) -> str:
    stored = User.objects.filter(pk=user.pk, is_superuser=True).exists()
    groups = set(Group.objects.filter(user=user, name__in=GROUPS).values_list("name", flat=True))
    return ", ".join(sorted(groups | ({Role.ADMINISTRATOR.value} if stored else set())))
