"""Passwords can be guessed only so often: tries are counted by name and address, and one too many locks both together.

Tries of a name are also counted over all addresses together, with a larger limit: an address can be chosen freely by
a process on the proxy's machine, and cheaply from a large network. Addresses from which the name has logged in are
exempt from that limit, so a stranger cannot lock a person out of their usual place.

A try is counted *before* the password is looked at, in one statement, so that a hundred guesses at the same moment are
as many as a hundred in a row. Who comes in is no longer counted. Only PostgreSQL is asked, which a login needs anyhow.
"""

from __future__ import annotations

import math
from datetime import timedelta
from importlib import import_module
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

import structlog
from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.signals import user_logged_in
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.db.models.functions import Now
from django.dispatch import receiver
from django.http import HttpRequest
from django.utils.crypto import salted_hmac

from scheduling.models import FailedLogin

log = structlog.get_logger(__name__)

KEPT = timedelta(days=1)  #: anybody can make up names
KNOWN_FOR = timedelta(days=90)  #: how long an address stays exempt after a login
ANY = "*"  #: the address of the row that counts a name over all addresses
ADDRESSES = 20  #: the limit of a name over all addresses, as a multiple of AFTERTOUCH_LOGIN_TRIES

COUNT = """
INSERT INTO scheduling_failedlogin AS kept (digest, address, user_id, tries, last_at)
VALUES (%(digest)s, %(address)s, %(user)s, 1, statement_timestamp())
ON CONFLICT (digest, address) DO UPDATE SET
    tries = CASE WHEN kept.last_at < statement_timestamp() - %(lockout)s THEN 1 ELSE kept.tries + 1 END,
    last_at = statement_timestamp()
WHERE kept.tries < %(limit)s OR kept.last_at < statement_timestamp() - %(lockout)s
RETURNING tries
"""
REMEMBER = """
INSERT INTO scheduling_failedlogin (digest, address, user_id, tries, last_at, succeeded_at)
VALUES (%(digest)s, %(address)s, %(user)s, 0, statement_timestamp(), statement_timestamp())
ON CONFLICT (digest, address) DO UPDATE SET tries = 0, succeeded_at = statement_timestamp(), user_id = %(user)s
"""


class Lockout:
    """The first authentication backend. It knows nobody; it only stops those who guess."""

    def authenticate(self, request: HttpRequest | None, username: str | None = None, **_: Any) -> None:
        if request is None or username is None:
            return  # nobody from outside
        tries = _try(username, _address(request))
        if tries is None or tries >= settings.AFTERTOUCH_LOGIN_TRIES:
            # Told with the last wrong password already. Where it is the right one nobody looks at this.
            request.login_locked_for = settings.AFTERTOUCH_LOGIN_LOCKOUT  # type: ignore[attr-defined]
        if tries is None:
            log.warning("login_locked", address=_address(request))
            raise PermissionDenied


def locked_minutes(request: HttpRequest | None) -> int:
    """For how long this request's name is locked where it came from; 0 where it is not."""
    span: timedelta | None = getattr(request, "login_locked_for", None)
    return math.ceil(span.total_seconds() / 60) if span else 0


def unlock(name: str) -> int:
    """Forget the tries of a name from all addresses. Return the number of addresses with failed tries."""
    rows = FailedLogin.objects.filter(digest=_digest(name))
    addresses = rows.filter(tries__gt=0).exclude(address=ANY).count()
    rows.delete()
    return addresses


@receiver(user_logged_in)
def come_in(request: HttpRequest | None, user: Any, **_: Any) -> None:
    if request is not None:
        values = {"digest": _digest(user.get_username()), "address": _address(request), "user": user.pk}
        with connection.cursor() as cursor:
            cursor.execute(REMEMBER, values)


def forget() -> None:
    """The sessions of the back office that are over."""
    import_module(settings.SESSION_ENGINE).SessionStore.clear_expired()


def _try(name: str, address: str) -> int | None:
    """Count a try. Return its number from this address, or None if the address or the name is locked."""
    tries = _count(name, address, settings.AFTERTOUCH_LOGIN_TRIES)
    known = FailedLogin.objects.filter(
        digest=_digest(name), address=address, succeeded_at__gt=Now() - KNOWN_FOR
    ).exists()
    if tries is None or known:
        return tries
    total = _count(name, ANY, settings.AFTERTOUCH_LOGIN_TRIES * ADDRESSES)
    return None if total is None else tries


def _count(name: str, address: str, limit: int) -> int | None:
    """Count a try in one row. Return its number, or None if the row has reached the limit."""
    user = get_user_model().objects.filter(username=name).values_list("pk", flat=True).first()
    values: dict[str, Any] = {
        "digest": _digest(name),
        "address": address,
        "user": user,
        "limit": limit,
        "lockout": settings.AFTERTOUCH_LOGIN_LOCKOUT,
    }
    with connection.cursor() as cursor:
        cursor.execute(COUNT, values)
        row = cursor.fetchone()
    if row == (1,):
        old = FailedLogin.objects.filter(last_at__lt=Now() - max(KEPT, settings.AFTERTOUCH_LOGIN_LOCKOUT))
        old.exclude(succeeded_at__gt=Now() - KNOWN_FOR).delete()
    return row[0] if row else None


def _digest(name: str) -> str:
    return salted_hmac("scheduling.web.login_lockout", name, algorithm="sha256").hexdigest()


def _address(request: HttpRequest) -> str:
    """Whom the web server names as the client. It believes `X-Forwarded-For` only from proxies that it trusts. Of IPv6
    the first half: the other belongs to whoever has it, and is as good as endless."""
    try:
        address = ip_address(request.META.get("REMOTE_ADDR", ""))
    except ValueError:
        return ""
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), 64), strict=False).network_address)
