"""Read a channel's settings strictly: an unknown or misspelt key is an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from scheduling.channels.base import DestinationRefused
from scheduling.channels.ssrf import PrivateHosts, check_url


def check_known_keys(settings: Mapping[str, Any], known: Iterable[str]) -> None:
    """Check that all keys are known.

    Raises:
        ValueError: "key: …" for the first unknown key.
    """
    names = sorted(known)
    for key in settings:
        if key not in names:
            raise ValueError(f"{key}: is not known here; known are {', '.join(names) or 'none'}")


def read_text(settings: Mapping[str, Any], key: str, default: str = "") -> str:
    """Return the text under `key`, or `default` if it is absent or null.

    Raises:
        ValueError: "key: …" for another type.
    """
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{key}: must be text")
    return value


def read_choice(settings: Mapping[str, Any], key: str, options: tuple[str, ...]) -> str:
    """Return one of `options`, the first one if absent.

    Raises:
        ValueError: "key: …" for another value.
    """
    value = read_text(settings, key, options[0])
    if value not in options:
        raise ValueError(f"{key}: must be one of {', '.join(options)}")
    return value


def read_url(settings: Mapping[str, Any], key: str = "url") -> str:
    """Return a URL that may be called. Names are not resolved here.

    Raises:
        ValueError: "key: …" for a missing or refused URL.
    """
    value = read_text(settings, key)
    if not value:
        raise ValueError(f"{key}: is missing")
    try:
        check_url(value, PrivateHosts.from_settings())
    except DestinationRefused as refused:
        raise ValueError(f"{key}: {refused.detail}") from None
    return value


def check_positive(timeout: timedelta) -> timedelta:
    """Return `timeout`.

    Raises:
        ValueError: it is not above zero.
    """
    if timeout <= timedelta(0):
        raise ValueError("timeout: must be above zero")
    return timeout


def time_left(deadline: datetime, timeout: timedelta) -> timedelta:
    """Return the time limit of an attempt that starts now. Zero or less: no time is left."""
    return min(timeout, deadline - datetime.now(UTC))


def opaque_key(kind: str, receiver: str) -> str:
    """Return a key that distinguishes receivers without exposing their URLs, which are secrets."""
    return f"{kind}:{sha256(receiver.encode('utf-8', 'replace')).hexdigest()[:32]}"
