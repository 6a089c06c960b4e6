"""The link that ends marketing messages for one customer, in one click and without a login (RFC 8058)."""

from __future__ import annotations

from django.conf import settings
from django.core import signing

SALT = "unsubscribe"


def make_token(user_id: str) -> str:
    """A signed token for `user_id`, safe in a URL. It never expires: old mail must keep its way out."""
    return signing.dumps(user_id, salt=SALT)


def read_token(token: str) -> str:
    """The user id of a token. Raises `django.core.signing.BadSignature` for anything that `make_token` did not make."""
    user_id = signing.loads(token, salt=SALT)
    if not isinstance(user_id, str):
        raise signing.BadSignature("not a user id")
    return user_id


def unsubscribe_url(user_id: str) -> str:
    """The link, or "" where `AFTERTOUCH_BASE_URL` is not set and nobody could follow it."""
    base = settings.AFTERTOUCH_BASE_URL.rstrip("/")
    return f"{base}/u/{make_token(user_id)}" if base else ""
