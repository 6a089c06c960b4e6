"""Keep sessions in PostgreSQL, and the list of sign-ins in step with them (`SESSION_ENGINE`)."""

from __future__ import annotations

from django.contrib.sessions.backends.db import SessionStore as DatabaseStore

from scheduling.identity.sign_ins import delete_orphans, hash_session_key
from scheduling.models import SignIn


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
        delete_orphans()
