"""Define the attributes and tags of a customer: typed values, their stored form and their limits.

The form of a JSON value is its type: text, number, true or false. A text in the form of RFC 3339 with an offset is an
instant. It is stored in UTC, so that equal instants have one text (see decision 33).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from scheduling.error_text import ErrorText as _

MAX_ATTRIBUTES = 50
MAX_ATTRIBUTE = 256  #: characters of a text
MAX_NAME = 64  #: characters of the name of an attribute
MAX_TAGS = 50
MAX_TAG = 64  #: characters
LARGEST_NUMBER = 2**63 - 1

AttributeValue = str | int | float | bool | datetime
StoredValue = str | int | float | bool

#: A letter, then letters, digits and “_”, in any script: a text names it as `customer.attributes.城市`.
_NAME = re.compile(r"[^\W\d_]\w*")
_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)")
UNSTORABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_NO_ATTRIBUTES: Final[Mapping[str, AttributeValue]] = {}


class Profile(NamedTuple):
    """What conditions and texts read of a customer beyond `CustomerSpec`. Tags are sorted."""

    attributes: Mapping[str, AttributeValue] = _NO_ATTRIBUTES
    tags: tuple[str, ...] = ()


NO_PROFILE: Final = Profile()


class InvalidValue(ValueError):
    """The name or the value is not accepted. The message states what is accepted."""


def read_profile(attributes: Mapping[str, Any], tags: Iterable[str]) -> Profile:
    """Return the typed values of stored attributes, and the tags."""
    return Profile({name: read_value(value) for name, value in attributes.items()}, tuple(tags))


def read_value(stored: Any) -> Any:
    """Return the instant that a text stands for, or the value itself. Any JSON value is accepted."""
    if type(stored) is str and len(stored) >= 20 and stored[4] == "-" and _INSTANT.fullmatch(stored):
        try:
            return _parse_instant(stored)
        except InvalidValue:
            return stored
    return stored


def store_value(value: Any) -> StoredValue:
    """Return the form in which a given value is stored.

    Raises:
        InvalidValue: it is no text, number, truth value or instant, or it is too long or too large.
    """
    if isinstance(value, datetime):
        return format_stored_instant(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        if not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
            raise InvalidValue(_("must be a number of at most 64 bits"))
        return value
    if not isinstance(value, str):
        raise InvalidValue(_("must be a text, a number, true, false or an instant"))
    if len(value) > MAX_ATTRIBUTE:
        raise InvalidValue(_("must not be longer than %(most)s characters", most=MAX_ATTRIBUTE))
    check_characters(value)
    return format_stored_instant(_parse_instant(value)) if _INSTANT.fullmatch(value) else value


def check_characters(text: str) -> str:
    """Refuse control characters, surrogates and noncharacters. Raises `InvalidValue`."""
    if not text.isprintable() and (found := UNSTORABLE.search(text)):  # the first question is cheap
        raise InvalidValue(_("contains %(character)s", character=f"U+{ord(found[0]):04X}"))
    return text


def format_stored_instant(at: datetime) -> str:
    if at.tzinfo is None:
        raise InvalidValue(_("must be an instant with a UTC offset"))
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _parse_instant(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidValue(_("has the form of an instant, but there is no such date, time or offset")) from None


def check_attribute_name(name: str) -> None:
    """Raise `InvalidValue` if `name` cannot name an attribute."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise InvalidValue(_("a name is a letter, then letters, digits and “_”, at most %(most)s", most=MAX_NAME))


def merge_attributes(stored: Mapping[str, StoredValue], changes: Mapping[str, Any]) -> dict[str, StoredValue]:
    """Return the attributes after valid changes. None removes one.

    Raises:
        InvalidValue: there would be more than `MAX_ATTRIBUTES`.
    """
    merged = {name: value for name, value in {**stored, **changes}.items() if value is not None}
    if len(merged) > MAX_ATTRIBUTES:
        raise InvalidValue(_("a customer has at most %(most)s attributes", most=MAX_ATTRIBUTES))
    return merged


def normalize_tags(tags: Sequence[str]) -> list[str]:
    """Return the tags sorted, each once.

    Raises:
        InvalidValue: there are too many, or one is empty, too long or has blanks at its ends.
    """
    kept = sorted(set(tags))
    if len(kept) > MAX_TAGS:
        raise InvalidValue(_("a customer has at most %(most)s tags", most=MAX_TAGS))
    for tag in kept:
        if not 0 < len(tag) <= MAX_TAG or tag != tag.strip() or UNSTORABLE.search(tag):
            raise InvalidValue(_("a tag has 1 to %(most)s characters and no blanks at its ends", most=MAX_TAG))
    return kept
