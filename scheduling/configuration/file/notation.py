"""Write the values of rows as a configuration file has them, and read them back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Any

from django.db import models

from scheduling.durations import format_duration, from_seconds, parse_duration, to_seconds
from scheduling.error_text import ErrorText as _
from scheduling.errors import InvalidInput, check_retry_delays, check_texts, errors_within, is_number
from scheduling.models.versioned import Bound
from scheduling.policy.send_times import WINDOW_KEYS, read_window

_CLOCK = re.compile(r"(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{6})?)?")
REQUIRED: Any = object()  #: in place of a default


def keep(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Notation:
    """How a file writes the values of a column."""

    description: str  #: in the reference
    #: Return the stored form. Raises `ValueError`, or `InvalidInput` with places inside the value.
    read: Callable[[Any], Any] = keep
    write: Callable[[Any], Any] = keep


def text(longest: int, *, empty: bool = False) -> Notation:
    def read(given: Any) -> str:
        if not isinstance(given, str):
            raise ValueError(_("must be text; put it in quotes") if given is not None else _("must be text"))
        if not empty and not given.strip():
            raise ValueError(_("must not be empty"))
        if len(given) > longest:
            raise ValueError(_("must not be longer than %(most)s characters", most=longest))
        return given

    return Notation(f"text of up to {longest:,} characters", read)


def choice(names: Mapping[str, Any]) -> Notation:
    """Return the notation of a choice, by the names of the stored values."""

    def read(given: Any) -> Any:
        if not isinstance(given, str) or given not in names:
            raise ValueError(_("must be one of %(known)s", known=", ".join(names)))
        return names[given]

    def write(stored: Any) -> Any:
        return next((name for name, value in names.items() if value == stored), stored)

    return Notation(", ".join(f"`{name}`" for name in names), read, write)


def _read_flag(given: Any) -> bool:
    if not isinstance(given, bool):
        raise ValueError(_("must be true or false"))
    return given


def _read_whole(given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool):
        raise ValueError(_("must be a whole number"))
    return given


def _read_number(given: Any) -> float:
    if not is_number(given):
        raise ValueError(_("must be a number"))
    return given  # type: ignore[no-any-return]


def _read_duration(given: Any) -> timedelta:
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        raise ValueError(_("must be a duration like 15m, 2h, 7d or 1h30m"))
    return parse_duration(given)


def _write_duration(stored: timedelta) -> str | int:
    return format_duration(stored) if stored else 0


def _read_clock(given: Any) -> time:
    if not isinstance(given, str) or not _CLOCK.fullmatch(given):
        raise ValueError(_('must be a time like "22:00"'))
    return time.fromisoformat(given)


def _write_clock(stored: time) -> str:
    return stored.isoformat("minutes" if stored == stored.replace(second=0, microsecond=0) else "auto")


def _read_instant(given: Any) -> datetime:
    try:
        at = datetime.fromisoformat(given)
        if at.tzinfo is not None:
            return at.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):  # the last for an offset beyond the first or the last year
        pass
    raise ValueError(_('must be an instant like "2026-11-11T00:00:00+08:00"'))


FLAG = Notation("`true` or `false`", _read_flag)
WHOLE = Notation("a whole number", _read_whole)
NUMBER = Notation("a number", _read_number, lambda stored: int(stored) if stored == int(stored) else stored)
DURATION = Notation("a duration", _read_duration, _write_duration)
#: A duration that is stored as seconds.
SECONDS = Notation(
    "a duration",
    lambda given: to_seconds(_read_duration(given)),
    lambda stored: _write_duration(from_seconds(stored)),
)
CLOCK = Notation('a time of day like `"22:00"`', _read_clock, _write_clock)
INSTANT = Notation(
    'an instant with its offset, like `"2026-11-11T00:00:00+08:00"`',
    _read_instant,
    lambda stored: stored.astimezone(UTC).isoformat(),
)
#: The row's own rules check the value.
ANY_MAPPING = Notation("a mapping")


def list_of(each: Notation) -> Notation:
    def read(given: Any) -> list[Any]:
        if not isinstance(given, list):
            raise ValueError(_("must be a list"))
        return [each.read(item) for item in given]

    return Notation(f"a list: {each.description}", read, lambda stored: [each.write(item) for item in stored])


def map_of(each: Notation) -> Notation:
    """Return the notation of a mapping with any names."""
    return Notation(
        f"a mapping to: {each.description}",
        lambda given: _read_members(given, lambda _name: each),
        lambda stored: {name: each.write(item) for name, item in sorted(stored.items())},
    )


def group_of(description: str, members: Mapping[str, tuple[Notation, Any]]) -> Notation:
    """Return the notation of a mapping with certain names, each with its default. Absent ones are stored too."""
    defaults = {name: default for name, (_notation, default) in members.items() if default is not REQUIRED}

    def find(name: str) -> Notation:
        if name not in members:
            raise ValueError(_("is not known here; known are %(known)s", known=", ".join(sorted(members))))
        return members[name][0]

    def read(given: Any) -> dict[str, Any]:
        read = defaults | _read_members(given, find)
        for name in members:
            if name not in read:
                raise InvalidInput.of(name, _("is missing"))
        return {name: read[name] for name in members}

    def write(stored: Mapping[str, Any]) -> dict[str, Any]:
        whole = defaults | dict(stored)
        return {name: notation.write(whole[name]) for name, (notation, _default) in members.items()}

    return Notation(description, read, write)


def _read_members(given: Any, find: Callable[[str], Notation]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(_("must be a mapping"))
    read: dict[str, Any] = {}
    for name, item in given.items():
        with errors_within(name):
            read[name] = find(name).read(item)
    return read


def _read_windows(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        return [read_window(given)]
    read = []
    for place, window in enumerate(given):
        with errors_within(f"[{place}]"):
            read.append(read_window(window))
    return read


def _write_windows(stored: Sequence[Mapping[str, Any]]) -> Any:
    written = [{key: each[key] for key in WINDOW_KEYS if key in each} for each in stored]
    return written[0] if len(written) == 1 else written


#: One send window or a list of them, stored as a list.
SEND_WINDOWS = Notation("a send window, or a list of them", _read_windows, _write_windows)


def derive_notation(field: models.Field[Any, Any]) -> Notation:
    """Return the notation of a column by its type, choices, length and bounds.

    Raises:
        TypeError: the type is not enough, as that of JSON; the section declares a notation.
    """
    if isinstance(field, models.ForeignKey):
        return derive_notation(field.related_model._meta.get_field("key"))  # type: ignore[arg-type]
    if field.choices:
        return choice({value: value for value, _label in field.flatchoices})
    if isinstance(field, models.CharField):
        return text(field.max_length, empty=field.blank)  # type: ignore[arg-type]  # it has one
    for bound in (each for each in field.validators if isinstance(each, Bound)):
        if bound.check is check_texts:
            return list_of(text(bound.limits["longest"]))
        if bound.check is check_retry_delays:
            return list_of(SECONDS)
    for kind, notation in _BY_TYPE.items():
        if isinstance(field, kind):
            return notation
    raise TypeError(f"{field} needs a notation")


_BY_TYPE: Mapping[type[models.Field[Any, Any]], Notation] = {
    models.BooleanField: FLAG, models.IntegerField: WHOLE, models.FloatField: NUMBER, models.DurationField: DURATION,
    models.DateTimeField: INSTANT, models.TimeField: CLOCK,
}  # fmt: skip
