"""List the open sign-ins of a user, and end them.

`SessionStore` keeps sessions in PostgreSQL, and the list of sign-ins in step with them (`SESSION_ENGINE`). Both tables
hold digests of the keys: who reads the database or a backup cannot take a session over.
"""

from __future__ import annotations

import hashlib
from typing import Any

from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in
from django.contrib.sessions.backends.db import SessionStore as DatabaseStore
from django.contrib.sessions.base_session import AbstractBaseSession
from django.contrib.sessions.models import Session
from django.db import connection, transaction
from django.db.models.functions import Now
from django.dispatch import receiver
from django.http import HttpRequest

from scheduling.audit import read_client_address
from scheduling.models import SignIn
from scheduling.strict_text import storable_text

BROWSER_LENGTH = 300  # characters
#: A sign-in of the last minute may not have stored its session.
DELETE_ORPHANS = """
DELETE FROM scheduling_signin
WHERE digest NOT IN (SELECT session_key FROM django_session)
  AND signed_in_at < statement_timestamp() - interval '1 minute'
"""


def hash_session_key(key: str) -> str:
    """Return 160 bits of the key's digest: the column of Django has 40 characters."""
    return hashlib.sha256(key.encode()).hexdigest()[:40]


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
    live = Session.objects.filter(expire_date__gt=Now()).values("session_key")
    return list(SignIn.objects.filter(user=user, digest__in=live))


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
    Session.objects.filter(session_key__in=digests).delete()
    SignIn.objects.filter(digest__in=digests).delete()
    return len(digests)


class SessionStore(DatabaseStore):
    """A session that is stored by the digest of its key. Its sign-in follows a new key and ends with the session."""

    def _get_session_from_db(self) -> Session | None:
        digest = hash_session_key(str(self.session_key))
        found = Session.objects.filter(session_key=digest, expire_date__gt=Now()).first()
        if found is None:
            self._session_key = None
        return found

    def exists(self, session_key: str) -> bool:
        return super().exists(hash_session_key(session_key))

    def create_model_instance(self, data: dict[str, Any]) -> AbstractBaseSession:
        row = super().create_model_instance(data)
        row.session_key = hash_session_key(row.session_key)
        return row

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
        if key := session_key or self.session_key:
            super().delete(hash_session_key(key))
            SignIn.objects.filter(digest=hash_session_key(key)).delete()

    @classmethod
    def clear_expired(cls) -> None:
        super().clear_expired()
        with connection.cursor() as cursor:
            cursor.execute(DELETE_ORPHANS)
