"""The link that ends marketing messages for one customer, in one click and without a login (RFC 8058)."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from functools import lru_cache

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings
from django.core.signing import BadSignature
from django.utils.crypto import salted_hmac

SALT = "unsubscribe"


def make_token(user_id: str) -> str:
    """Encrypt and sign `user_id` into a token that is safe in a URL.

    Mail is forwarded and logged, so the token does not show the id. It never expires: an old mail keeps its link. It is
    read as long as the key that made it stands in `SECRET_KEY` or `SECRET_KEY_FALLBACKS`.
    """
    return _cipher().encrypt(user_id.encode()).decode().rstrip("=")


def read_token(token: str) -> str:
    """Return the user id of a token. Raises `BadSignature` for anything that `make_token` did not make."""
    try:
        return _cipher().decrypt(token + "=" * (-len(token) % 4)).decode()
    except (InvalidToken, ValueError) as error:
        raise BadSignature("not a token") from error


def _cipher() -> MultiFernet:
    return _cipher_of((settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS))


@lru_cache(maxsize=4)
def _cipher_of(keys: tuple[str, ...]) -> MultiFernet:
    """Keys of its own purpose, derived from those of the site."""
    derived = [salted_hmac(SALT, "", secret=key, algorithm="sha256").digest() for key in keys]
    return MultiFernet([Fernet(urlsafe_b64encode(key)) for key in derived])


def unsubscribe_url(user_id: str) -> str:
    """The link, or "" where `AFTERTOUCH_BASE_URL` is not set and nobody could follow it."""
    base = settings.AFTERTOUCH_BASE_URL.rstrip("/")
    return f"{base}/u/{make_token(user_id)}" if base else ""
