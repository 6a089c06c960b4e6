"""Find the user that an OpenID provider names, and give the roles of its groups.

A subject belongs to one user. A local user is linked by an administrator, or by a verified e-mail address where
`AFTERTOUCH_OIDC_LINK_BY_EMAIL` allows it; in no other way does a sign-in reach an existing user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from django.conf import settings
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import Q

from scheduling.identity.roles import assign_roles
from scheduling.models import IdentityLink

log = structlog.get_logger(__name__)

USERNAME_LENGTH = 150


class SubjectRefused(Exception):
    """The provider's user may not sign in. The first argument is the reason: `no_role`, `taken`, `disabled`."""


def find_or_create_user(claims: Mapping[str, Any]) -> User:
    """Return the user of checked claims. Concurrent sign-ins of a new subject create one user.

    Raises:
        SubjectRefused: no role, a local user has the name, or the user is disabled.
    """
    try:
        return _find_user(claims)
    except (IntegrityError, SubjectRefused):  # another request may have linked the subject since its link was read
        return _find_user(claims)


@transaction.atomic
def _find_user(claims: Mapping[str, Any]) -> User:
    roles = _read_roles(claims)
    issuer, subject = settings.AFTERTOUCH_OIDC_ISSUER, str(claims["sub"])
    link = IdentityLink.objects.select_related("user").filter(issuer=issuer, subject=subject).first()
    user = link.user if link else _link_local_user(claims) or _create_user(claims, roles)
    if not user.is_active:
        raise SubjectRefused("disabled")
    if settings.AFTERTOUCH_OIDC_GROUP_MAP:
        if not roles:
            raise SubjectRefused("no_role")
        assign_roles(user, roles)
    if not link:
        IdentityLink.objects.create(user=user, issuer=issuer, subject=subject)
        log.info("identity_linked", user=user.get_username())
    return user


def _read_roles(claims: Mapping[str, Any]) -> list[str]:
    """Return the roles of the provider's groups. A single group may be a text."""
    given = claims.get(settings.AFTERTOUCH_OIDC_GROUP_CLAIM) or []
    groups = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    wanted = settings.AFTERTOUCH_OIDC_GROUP_MAP
    return [wanted[group] for group in groups if isinstance(group, str) and group in wanted]


def _read_verified_email(claims: Mapping[str, Any]) -> str:
    email = claims.get("email")
    return email if isinstance(email, str) and claims.get("email_verified") is True else ""


def _link_local_user(claims: Mapping[str, Any]) -> User | None:
    """Return the only local user with the verified e-mail address and without a link, if the setting allows it."""
    email = _read_verified_email(claims)
    if not (email and settings.AFTERTOUCH_OIDC_LINK_BY_EMAIL):
        return None
    found = list(User.objects.select_for_update().filter(email__iexact=email)[:2])
    if len(found) != 1 or found[0].identity_links.filter(issuer=settings.AFTERTOUCH_OIDC_ISSUER).exists():
        return None  # another subject is this user: the address was given to another person
    return found[0]


def _create_user(claims: Mapping[str, Any], roles: list[str]) -> User:
    if not roles:
        raise SubjectRefused("no_role")
    email = _read_verified_email(claims)
    username = (email or f"oidc-{claims['sub']}")[:USERNAME_LENGTH]
    taken = Q(username__iexact=username) | (Q(email__iexact=email) if email else Q())
    if User.objects.filter(taken).exists():
        raise SubjectRefused("taken")
    names = {"first_name": claims.get("given_name"), "last_name": claims.get("family_name")}
    texts = {name: value[:150] for name, value in names.items() if isinstance(value, str)}
    return User.objects.create_user(username, email, password=None, is_staff=True, **texts)
