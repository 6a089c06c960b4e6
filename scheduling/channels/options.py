"""Reading a channel's settings strictly: an unknown or misspelt key is an error, never silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from scheduling.channels.base import Refused
from scheduling.channels.ssrf import PrivateHosts, admit


def only(settings: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises `ValueError("key: is not known here …")` for the first key that is not one of `known`."""
    names = sorted(known)
    for key in settings:
        if key not in names:
            raise ValueError(f"{key}: is not known here; known are {', '.join(names) or 'none'}")


def text(settings: Mapping[str, Any], key: str, default: str = "") -> str:
    """The text under `key`; absent and null mean `default`. Raises `ValueError("key: …")` for anything but text."""
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{key}: must be text")
    return value


def choice(settings: Mapping[str, Any], key: str, options: tuple[str, ...]) -> str:
    """One of `options`, the first where absent. Raises `ValueError("key: …")`."""
    value = text(settings, key, options[0])
    if value not in options:
        raise ValueError(f"{key}: must be one of {', '.join(options)}")
    return value


def url(settings: Mapping[str, Any], key: str = "url") -> str:
    """A URL that may be posted to. Raises `ValueError("key: …")`; names are not resolved here."""
    value = text(settings, key)
    if not value:
        raise ValueError(f"{key}: is missing")
    try:
        admit(value, PrivateHosts.from_settings())
    except Refused as refused:
        raise ValueError(f"{key}: {refused.detail}") from None
    return value


def positive(timeout: timedelta) -> timedelta:
    """Raises `ValueError("timeout: …")` unless it is above zero."""
    if timeout <= timedelta(0):
        raise ValueError("timeout: must be above zero")
    return timeout


def time_left(deadline: datetime, timeout: timedelta) -> timedelta:
    """What an attempt that begins now may take. Zero or less: there is no time for it."""
    return min(timeout, deadline - datetime.now(UTC))


def opaque_key(kind: str, receiver: str) -> str:
    """A key that tells receivers apart without naming them: their URLs are secrets."""
    return f"{kind}:{sha256(receiver.encode('utf-8', 'replace')).hexdigest()[:32]}"
