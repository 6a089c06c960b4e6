"""Limit password guesses: count tries by name and address, and lock the pair after too many.

Tries of a name are also counted over all addresses together, with a larger limit. A process on the proxy's machine can
choose its address freely, and a large network has many. Addresses from which the name has logged in are exempt from
that limit: a stranger cannot lock a user out of a known address.

A try is counted *before* the password is checked, in one statement: 100 concurrent guesses count as 100. A successful
login resets the count. Only PostgreSQL is used, which a login needs anyway.
"""

from __future__ import annotations

import math
from datetime import timedelta
from ipaddress import ip_address, ip_network
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

from scheduling.audit import read_client_address
from scheduling.models import FailedLogin

log = structlog.get_logger(__name__)

KEPT = timedelta(days=1)  #: a client can invent names, so rows expire
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
RESET_TRIES = """
INSERT INTO scheduling_failedlogin (digest, address, user_id, tries, last_at, succeeded_at)
VALUES (%(digest)s, %(address)s, %(user)s, 0, statement_timestamp(), statement_timestamp())
ON CONFLICT (digest, address) DO UPDATE SET tries = 0, succeeded_at = statement_timestamp(), user_id = %(user)s
"""


class Lockout:
    """The first authentication backend. It authenticates no user; it only stops guesses."""

    def authenticate(self, request: HttpRequest | None, username: str | None = None, **_: Any) -> None:
        if request is not None and username is not None:  # a login over HTTP
            count_login_try(request, username)


def count_login_try(request: HttpRequest, username: str) -> None:
    """Count a try before a password or a code is checked. Passwords and codes share one count.

    Raises:
        PermissionDenied: the name and address are locked.
    """
    tries = _count_try(username, _find_client(request))
    # 0 with the last allowed try, so that its response shows the lock. A correct password ignores it.
    request.login_tries_left = -1 if tries is None else settings.AFTERTOUCH_LOGIN_TRIES - tries  # type: ignore[attr-defined]
    if tries is None:
        log.warning("login_locked", address=_find_client(request))
        raise PermissionDenied


def locked_minutes(request: HttpRequest | None) -> int:
    """Return the minutes for which the request's name and address are locked; 0 if they are not."""
    is_locked = getattr(request, "login_tries_left", 1) <= 0
    return math.ceil(settings.AFTERTOUCH_LOGIN_LOCKOUT.total_seconds() / 60) if is_locked else 0


def unlock_login(name: str) -> int:
    """Forget the tries of a name from all addresses. Return the number of addresses with failed tries."""
    rows = FailedLogin.objects.filter(digest=_hash_name(name))
    addresses = rows.filter(tries__gt=0).exclude(address=ANY).count()
    rows.delete()
    return addresses


@receiver(user_logged_in)
def reset_tries(request: HttpRequest | None, user: Any, **_: Any) -> None:
    """Reset the tries of the name from this address, and mark the address as known."""
    if request is not None:
        values = {"digest": _hash_name(user.get_username()), "address": _find_client(request), "user": user.pk}
        with connection.cursor() as cursor:
            cursor.execute(RESET_TRIES, values)


def _count_try(name: str, address: str) -> int | None:
    """Count a try. Return its number from this address, or None if the address or the name is locked."""
    values: dict[str, Any] = {
        "digest": _hash_name(name),
        "user": get_user_model().objects.filter(username=name).values_list("pk", flat=True).first(),
        "lockout": settings.AFTERTOUCH_LOGIN_LOCKOUT,
    }
    limit = settings.AFTERTOUCH_LOGIN_TRIES
    with connection.cursor() as cursor:
        tries = _increment_tries(cursor, values | {"address": address, "limit": limit})
        if tries == 1:
            old = FailedLogin.objects.filter(last_at__lt=Now() - max(KEPT, settings.AFTERTOUCH_LOGIN_LOCKOUT))
            old.exclude(succeeded_at__gt=Now() - KNOWN_FOR).delete()
        here = FailedLogin.objects.filter(digest=values["digest"], address=address)
        if tries is None or here.filter(succeeded_at__gt=Now() - KNOWN_FOR).exists():
            return tries
        total = _increment_tries(cursor, values | {"address": ANY, "limit": limit * ADDRESSES})
        return None if total is None else tries


def _increment_tries(cursor: Any, values: dict[str, Any]) -> int | None:
    """Count a try in one row. Return its number, or None if the row has reached the limit."""
    cursor.execute(COUNT, values)
    row = cursor.fetchone()
    return row[0] if row else None


def _hash_name(name: str) -> str:
    return salted_hmac("scheduling.web.login_lockout", name, algorithm="sha256").hexdigest()


def _find_client(request: HttpRequest) -> str:
    """Return the client's address; of an IPv6 address its /64 network, because one client can use all of it."""
    address = read_client_address(request)
    return str(ip_network((int(ip_address(address)), 64), strict=False).network_address) if ":" in address else address
