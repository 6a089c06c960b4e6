"""Parse and format durations: `15m`, `2h`, `7d`, `1h30m`, `0`."""

from __future__ import annotations

import re
from datetime import timedelta

from scheduling.error_text import ErrorText as _

YEAR = timedelta(days=365)  #: the longest duration in configuration
UNITS = {
    "w": timedelta(weeks=1),
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
    "us": timedelta(microseconds=1),
}
FORMAT_UNITS = ("d", "h", "m", "s", "ms", "us")  #: without weeks: 7d stays 7d
_PART = re.compile(r"([0-9]{1,18})(ms|us|[wdhms])")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def parse_duration(given: str | int) -> timedelta:
    """Parse a duration of up to a year: parts with units, the largest first.

    Raises:
        ValueError: another text, a unit given twice or a longer span.
    """
    if given == 0 and not isinstance(given, bool):
        return timedelta(0)
    text = str(given).strip()
    if text == "0":
        return timedelta(0)
    if text.startswith("-"):
        raise ValueError(_("must not be negative"))
    if not _WHOLE.fullmatch(text):
        raise ValueError(_("“%(given)s” is not a duration; write it like 15m, 2h, 7d or 1h30m", given=text[:40]))
    parts = _PART.findall(text)
    units = [unit for _, unit in parts]
    if units != sorted(set(units), key=list(UNITS).index):
        raise ValueError(_("“%(given)s” must name each unit once, the largest first", given=text[:40]))
    try:
        span = sum((int(count) * UNITS[unit] for count, unit in parts), timedelta(0))
    except OverflowError:
        span = timedelta.max
    if span > YEAR:
        raise ValueError(_("must not be longer than a year (365d)"))
    return span


def format_duration(span: timedelta) -> str:
    """Return the shortest text that `parse_duration` reads as exactly this span."""
    parts = []
    for unit in FORMAT_UNITS:
        count, span = divmod(span, UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0"


def from_seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def to_seconds(span: timedelta) -> int | float:
    """Return seconds as JSON columns store them: whole seconds as an integer."""
    seconds = span.total_seconds()
    return int(seconds) if seconds.is_integer() else seconds
