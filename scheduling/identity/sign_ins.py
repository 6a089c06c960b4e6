"""List the open sign-ins of a user, and end them. The session of a sign-in holds its time, address and browser."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib.auth import SESSION_KEY
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in
from django.contrib.sessions.models import Session
from django.db.models.functions import Now
from django.dispatch import receiver
from django.http import HttpRequest
from django.utils.timezone import now

from scheduling.audit import read_client_address
from scheduling.strict_text import storable_text

SIGN_IN = "sign_in"  #: key in the session
BROWSER_LENGTH = 300  # characters


@dataclass(frozen=True, slots=True)
class SignIn:
    session_key: str
    at: datetime
    address: str
    browser: str

    @property
    def digest(self) -> str:
        """Return what names the sign-in on pages: its session key lets a reader take it over."""
        return hashlib.sha256(self.session_key.encode()).hexdigest()


@receiver(user_logged_in)
def record_sign_in(request: HttpRequest | None, **_: Any) -> None:
    """Note time, address and browser in the session."""
    if request is not None:
        browser = storable_text(request.headers.get("User-Agent", "")[:BROWSER_LENGTH])
        address = read_client_address(request)
        request.session[SIGN_IN] = {"at": now().isoformat(), "address": address, "browser": browser}


def list_sign_ins(user: User) -> list[SignIn]:
    """Return the sign-ins whose session has not expired, newest first.

    The session table has some rows for each user of the back office, so that it is read as a whole.
    """
    found = []
    for row in Session.objects.filter(expire_date__gt=Now()).iterator():
        data = row.get_decoded()
        if data.get(SESSION_KEY) == str(user.pk) and (noted := data.get(SIGN_IN)):
            at = datetime.fromisoformat(noted["at"])
            found.append(SignIn(row.session_key, at, noted["address"], noted["browser"]))
    return sorted(found, key=lambda each: each.at, reverse=True)


def end_sign_ins(sign_ins: Iterable[SignIn]) -> int:
    """Delete the sessions. Return the number of those that were open.

    A request that runs at this time keeps its answer. It cannot store the session again: Django refuses to save a
    session whose row is gone.
    """
    return Session.objects.filter(session_key__in=[each.session_key for each in sign_ins]).delete()[0]
