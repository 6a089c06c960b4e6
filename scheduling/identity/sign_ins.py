"""List the open sign-ins of a user, and end them.

`SessionStore` keeps sessions in PostgreSQL, and the list of sign-ins in step with them (`SESSION_ENGINE`).
"""

from __future__ import annotations

import hashlib
from typing import Any

from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in
from django.contrib.sessions.backends.db import SessionStore as DatabaseStore
from django.contrib.sessions.models import Session
from django.db import connection, transaction
from django.db.models.functions import Now
from django.dispatch import receiver
from django.http import HttpRequest

from scheduling.audit import read_client_address
from scheduling.models import SignIn
from scheduling.strict_text import storable_text

BROWSER_LENGTH = 300  # characters
#: The session table has some rows for each user of the back office, so that it is read as a whole.
DELETE_SESSIONS = """
DELETE FROM django_session WHERE encode(sha256(convert_to(session_key, 'UTF8')), 'hex') = ANY(%s)
"""
#: A sign-in of the last minute may not have stored its session.
DELETE_ORPHANS = """
DELETE FROM scheduling_signin WHERE digest NOT IN (
    SELECT encode(sha256(convert_to(session_key, 'UTF8')), 'hex') FROM django_session
) AND signed_in_at < statement_timestamp() - interval '1 minute'
"""


def hash_session_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@receiver(user_logged_in)
def record_sign_in(request: HttpRequest | None, user: Any, **_: Any) -> None:
    """Store the sign-in with its address and browser."""
    if request is None:
        return
    if not request.session.session_key:  # a login in place of another user's has not stored its session yet
        request.session.create()
    SignIn.objects.update_or_create(
        digest=hash_session_key(str(request.session.session_key)),
        defaults={
            "user": user,
            "address": read_client_address(request),
            "browser": storable_text(request.headers.get("User-Agent", "")[:BROWSER_LENGTH]),
        },
    )


def list_sign_ins(user: User) -> list[SignIn]:
    """Return the sign-ins whose session has not expired, newest first."""
    live = {
        hash_session_key(key)
        for key in Session.objects.filter(expire_date__gt=Now()).values_list("session_key", flat=True)
    }
    return [row for row in SignIn.objects.filter(user=user) if row.digest in live]


@transaction.atomic
def end_sign_ins(user: User, *, only: int | None = None, but: str | None = None) -> int:
    """Delete sessions of a user: all, one row, or all but one session key. Return their number.

    A request that runs at this time keeps its answer. It cannot store the session again: Django refuses to save a
    session whose row is gone.
    """
    rows = SignIn.objects.filter(user=user)
    if only is not None:
        rows = rows.filter(pk=only)
    if but is not None:
        rows = rows.exclude(digest=hash_session_key(but))
    digests = list(rows.values_list("digest", flat=True))
    with connection.cursor() as cursor:
        cursor.execute(DELETE_SESSIONS, [digests])
    SignIn.objects.filter(digest__in=digests).delete()
    return len(digests)


class SessionStore(DatabaseStore):
    """A session whose sign-in follows a new key and ends with the session."""

    def cycle_key(self) -> None:
        """Give the session a new key, for example after a change of the password. Its sign-in stays in the list."""
        data, old = self._session, self.session_key  # type: ignore[attr-defined]
        self.create()
        self._session_cache = data
        if old:
            rows = SignIn.objects.filter(digest=hash_session_key(old))
            rows.update(digest=hash_session_key(str(self.session_key)))
            self.delete(old)

    def delete(self, session_key: str | None = None) -> None:
        key = session_key or self.session_key
        super().delete(session_key)
        if key:
            SignIn.objects.filter(digest=hash_session_key(key)).delete()

    @classmethod
    def clear_expired(cls) -> None:
        super().clear_expired()
        with connection.cursor() as cursor:
            cursor.execute(DELETE_ORPHANS)
