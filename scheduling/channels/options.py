"""Read a channel's settings strictly: an unknown or misspelt key is an error.

Each reader raises `InvalidSetting` for a value that it does not accept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from django.conf import settings as installation

from scheduling.channels.base import DestinationRefused, InvalidSetting, Quota, Quotas
from scheduling.channels.ssrf import DIRECT, PrivateHosts, check_proxy, check_url
from scheduling.durations import format_duration, parse_duration
from scheduling.error_text import ErrorText as _

MOST_QUOTAS = 5
LARGEST_QUOTA = 1_000  # Redis keeps at most as many instants for each receiver, as in `quota_list.lua`
LONGEST_WINDOW = timedelta(days=31)


def write_instant(at: datetime, precision: str = "auto") -> str:
    """Return an instant as receivers get it: RFC 3339 in UTC, such as `2026-01-31T08:00:00Z`."""
    return at.astimezone(UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def check_known_keys(settings: Mapping[str, Any], known: Iterable[str], path: str = "") -> None:
    """Check that all keys of the settings, or of the part at `path`, are known."""
    names = frozenset(known)
    for key in settings:
        if key not in names:
            name, listed = f"{path}.{key}" if path else key, ", ".join(sorted(names)) or "none"
            raise InvalidSetting(name, _("is not known here; known are %(known)s", known=listed))


def read_text(settings: Mapping[str, Any], key: str, default: str = "") -> str:
    """Return the text under `key`, or `default` if it is absent or null."""
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, str):
        raise InvalidSetting(key, _("must be text"))
    return value


def read_word(settings: Mapping[str, Any], key: str) -> str:
    """Return the text or the whole number under `key` as text: a YAML file may write an id without quotes."""
    value = settings.get(key)
    return str(value) if type(value) is int else read_text(settings, key)


def read_span(settings: Mapping[str, Any], key: str, longest: timedelta) -> timedelta:
    """Return the duration under `key`, zero if it is absent."""
    try:
        span = parse_duration(settings.get(key) or 0)
    except ValueError as error:
        raise InvalidSetting(key, str(error)) from None
    if span > longest:
        raise InvalidSetting(key, _("must be at most %(most)s", most=format_duration(longest)))
    return span


def read_quotas(settings: Mapping[str, Any], default: Quotas) -> Quotas:
    """Return `quotas`, a list of texts like `20/1m`, or `default` if it is absent."""
    given = settings.get("quotas")
    if given is None:
        return default
    if not isinstance(given, list) or len(given) > MOST_QUOTAS:
        raise InvalidSetting("quotas", _("must be a list of at most %(most)s texts like 20/1m", most=MOST_QUOTAS))
    return tuple(_read_quota(each) for each in given)


def _read_quota(given: Any) -> Quota:
    number, _slash, span = given.partition("/") if isinstance(given, str) else ("", "", "")
    try:
        limit, window = int(number), parse_duration(span.strip())
    except ValueError:
        raise InvalidSetting("quotas", _("“%(given)s” is not like 20/1m", given=given)) from None
    if not 0 < limit <= LARGEST_QUOTA or not timedelta(0) < window <= LONGEST_WINDOW:
        raise InvalidSetting(
            "quotas",
            _("“%(given)s”: the number is 1 to %(most)s, the time at most 31d", given=given, most=LARGEST_QUOTA),
        )
    return Quota(limit, window)


def read_flag(settings: Mapping[str, Any], key: str) -> bool:
    """Return the switch under `key`, False if it is absent."""
    value = settings.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidSetting(key, _("must be true or false"))
    return bool(value)


def read_choice(settings: Mapping[str, Any], key: str, options: tuple[str, ...]) -> str:
    """Return one of `options`, the first one if absent."""
    value = read_text(settings, key, options[0])
    if value not in options:
        raise InvalidSetting(key, _("must be one of %(known)s", known=", ".join(options)))
    return value


def read_url(settings: Mapping[str, Any]) -> str:
    """Return `url`, which may be called. Names are not resolved here."""
    value = read_text(settings, "url")
    if not value:
        raise InvalidSetting("url", _("is missing"))
    try:
        check_url(value, PrivateHosts.from_settings())
    except DestinationRefused as refused:
        raise InvalidSetting("url", refused.detail) from None
    return value


def read_proxy(settings: Mapping[str, Any]) -> str:
    """Return `proxy`, to be given to the transport: an address, `direct`, or "" for the installation's proxy.

    An address in a private network must be that of the installation's proxy or an allowed private host: an editor must
    not reach other servers there.

    The error has no part of the value, which may contain a password.
    """
    value = read_text(settings, "proxy")
    try:
        if value not in ("", DIRECT):
            check_proxy(value, PrivateHosts.from_settings().with_proxy(installation.AFTERTOUCH_HTTP_PROXY))
    except DestinationRefused as refused:
        raise InvalidSetting("proxy", refused.detail) from None
    return value


def opaque_key(kind: str, receiver: str) -> str:
    """Return a key that distinguishes receivers without exposing their URLs, which are secrets."""
    return f"{kind}:{sha256(receiver.encode('utf-8', 'replace')).hexdigest()[:32]}"
