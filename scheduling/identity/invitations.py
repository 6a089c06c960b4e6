"""Invite colleagues by a one-use link, and read and assign the roles of users."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from datetime import timedelta
from typing import cast
from uuid import uuid4

import structlog
from django.conf import settings
from django.contrib.auth.models import Group, User
from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.urls import reverse
from django.utils.timezone import now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from scheduling.audit import record_action
from scheduling.channels.base import Delivered, Message
from scheduling.channels.email import Email
from scheduling.channels.http_client import send_once
from scheduling.models import Invitation, Role

log = structlog.get_logger(__name__)

SHORT_LABELS = {
    "viewer": gettext_lazy("Viewer"),
    "operator": gettext_lazy("Operator"),
    "editor": gettext_lazy("Editor"),
    "command editor": gettext_lazy("Command editor"),
    "administrator": gettext_lazy("Administrator"),
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


VALID_FOR = timedelta(hours=72)
MAIL_TIMEOUT = timedelta(seconds=10)


class InvitationEnded(Exception):
    """The invitation lets no user in.

    It was accepted or withdrawn, has expired or never existed (`ended`), the user who invited may not invite any more
    (`inviter`), or users sign in at the provider only (`provider`).
    """

    def __init__(self, reason: str = "ended") -> None:
        super().__init__(reason)
        self.reason = reason


def create_invitation(name: str, email: str, role: str, invited_by: User) -> tuple[Invitation, str]:
    """Store an invitation. Return it with its token, which is stored nowhere."""
    token = secrets.token_urlsafe(32)
    row = Invitation.objects.create(
        name=name, email=email, role=role, invited_by=invited_by, digest=_hash_token(token),
        expires_at=now() + VALID_FOR,
    )  # fmt: skip
    return row, token


def find_invitation(token: str) -> Invitation:
    """Return the open invitation of a token.

    Raises:
        InvitationEnded: there is none, or it lets no user in.
    """
    row = _open_invitations().filter(digest=_hash_token(token)).select_related("invited_by").first()
    if row is None:
        raise InvitationEnded
    if settings.AFTERTOUCH_OIDC_ONLY:
        raise InvitationEnded("provider")
    if not may_invite(row.invited_by):
        raise InvitationEnded("inviter")
    return row


def may_invite(user: User | None) -> bool:
    """Return whether the user may invite colleagues now: an active administrator."""
    return user is not None and user.is_active and user.is_superuser


@transaction.atomic
def accept_invitation(token: str, user: User) -> None:
    """Store the new user with the role of the invitation. Of concurrent calls with one token, one succeeds.

    The UPDATE locks the invitation. A second call waits for it and then finds no open invitation. The lock of the user
    who invited makes an end of that user's right come before or after.

    Raises:
        InvitationEnded: the invitation is not open, or lets no user in.
    """
    row = find_invitation(token)
    if not may_invite(User.objects.select_for_update(no_key=True).filter(pk=cast("int", row.invited_by_id)).first()):
        raise InvitationEnded("inviter")
    if not _open_invitations().filter(pk=row.pk).update(accepted_at=Now()):
        raise InvitationEnded
    user.email = row.email
    user.is_staff = True
    user.save()
    assign_roles(user, [row.role], by=row.invited_by.get_username() if row.invited_by else "")
    Invitation.objects.filter(pk=row.pk).update(user=user)


def withdraw_invitation(row: Invitation) -> bool:
    """End an open invitation. Return False if it was not open."""
    return bool(_open_invitations().filter(pk=row.pk).update(withdrawn_at=Now()))


def build_link(token: str) -> str:
    return settings.AFTERTOUCH_BASE_URL.rstrip("/") + reverse("admin:invitation_accept", args=[token])


def mail_invitation(row: Invitation, link: str) -> bool | None:
    """Send the link. Return whether the relay took the mail; None if no relay or address is set.

    Blocks for 10 s at most. Call it after the invitation is committed.
    """
    if not (settings.AFTERTOUCH_EMAIL_URL and row.email):
        return None
    body = _(
        "%(who)s invites you to Aftertouch as %(role)s.\n\nOpen this link within 72 hours and choose a name and a "
        "password. It works once:\n%(link)s"
    ) % {"who": row.invited_by, "role": SHORT_LABELS[row.role], "link": link}
    message = Message(
        task_id=uuid4(), delivery_key=uuid4(), user_id="", chat_id="", node="", content_type="", category="service",
        subject=_("Invitation to Aftertouch"), body=body, locale="", event={}, target={"address": row.email},
    )  # fmt: skip
    try:
        return isinstance(send_once(Email({}, MAIL_TIMEOUT), message), Delivered)
    except ValueError:  # AFTERTOUCH_EMAIL_FROM or AFTERTOUCH_EMAIL_URL is invalid; the page shows the link
        log.exception("invitation_mail_failed")
        return False


def _open_invitations() -> QuerySet[Invitation]:
    return Invitation.objects.filter(accepted_at=None, withdrawn_at=None, expires_at__gt=Now())


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
