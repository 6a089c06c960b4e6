"""Read and write send windows: the mapping that files and rows hold, and the line that operators type. Pure.

Mapping: `{"days": ["mon", "tue"], "from": "10:00", "to": "20:00", "calendar": "china", "timezone": "customer"}`.
Line: `mon-fri 10:00-20:00 calendar=china timezone=Asia/Shanghai`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, InvalidInput
from scheduling.policy.send_times import CalendarsSpec, SendWindow

MOST_WINDOWS = 14
CUSTOMER = "customer"  #: as a time zone: the customer's own
DAY_NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_SPANS = {"daily": frozenset(range(7)), "weekend": frozenset({5, 6})}
_CLASSES = ("working", "free")  #: by the calendar instead of the weekday
DAYS = (*DAY_NAMES, *_SPANS, *_CLASSES)
_CHINESE_DAYS = "一二三四五六日"
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})")
_LINE = re.compile(r"(?P<days>\S+)\s+(?P<begin>\d{1,2}:\d{2})\s*-\s*(?P<end>\d{1,2}:\d{2})")
_OPTION = re.compile(r"(?:^|\s)(calendar|timezone|日历|时区)\s*[=＝]\s*(\S+)")
_OPTION_NAMES = {"日历": "calendar", "时区": "timezone"}
WINDOW_KEYS = ("days", "from", "to", "calendar", "timezone")


def read_window(given: Any) -> dict[str, Any]:
    """Return the stored form of a window. Absent `days` are every day; hours get two digits.

    Raises:
        InvalidInput: with the key of each wrong value; "" if it is no mapping.
    """
    found = ErrorCollector()
    if not isinstance(given, Mapping) or not given.keys() <= set(WINDOW_KEYS):
        raise InvalidInput.of("", _("must be a mapping with %(known)s", known=", ".join(WINDOW_KEYS)))
    days = given.get("days", ["daily"])
    if not isinstance(days, list) or not days or not all(isinstance(day, str) and day in DAYS for day in days):
        found.add("days", _("must be a list of some of %(known)s", known=", ".join(DAYS)))
        days = []
    begin, end = (_check_clock(given.get(key), key, found) for key in ("from", "to"))
    if begin is not None and end is not None and begin >= end:
        found.add("to", _("must end later than it starts; use two windows over midnight"))
    stored = {"days": list(dict.fromkeys(days)), "from": _write_clock(begin), "to": _write_clock(end)}
    calendar, timezone = given.get("calendar", ""), given.get("timezone", CUSTOMER)
    if not isinstance(calendar, str):
        found.add("calendar", _("must be text"))
    elif calendar:
        stored["calendar"] = calendar
    if timezone != CUSTOMER:
        if not isinstance(timezone, str) or not is_time_zone(timezone):
            found.add(
                "timezone",
                _(
                    "“%(timezone)s” is not %(customer)s or an IANA time zone, like Asia/Shanghai",
                    timezone=timezone,
                    customer=CUSTOMER,
                ),
            )
        stored["timezone"] = timezone
    found.raise_if_any()
    return stored


def is_time_zone(name: str) -> bool:
    """Return whether this is the name of an IANA time zone."""
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # a directory of the database, a path outside it, a NUL
        return False
    return bool(name)


def check_windows(given: Any, found: ErrorCollector, field: str) -> None:
    if not isinstance(given, list) or len(given) > MOST_WINDOWS:
        found.add(field, _("must be a list of at most %(most)s windows", most=MOST_WINDOWS))
        return
    for place, each in enumerate(given):
        try:
            read_window(each)
        except InvalidInput as error:
            for problem in error.errors:
                inner = f".{problem.field}" if problem.field else ""
                found.add(f"{field}[{place}]{inner}", problem.message)


def _check_clock(given: Any, key: str, found: ErrorCollector) -> int | None:
    match = _CLOCK.fullmatch(given) if isinstance(given, str) else None
    if match is None or int(match[2]) > 59 or (minute := int(match[1]) * 60 + int(match[2])) > 24 * 60:
        found.add(key, _("is missing") if given is None else _('must be a time like "09:00", at most "24:00"'))
        return None
    return minute


def _write_clock(minute: int | None) -> str:
    return f"{(minute or 0) // 60:02}:{(minute or 0) % 60:02}"


def list_calendars(stored: Sequence[Mapping[str, Any]] | None) -> list[tuple[int, str]]:
    """Return the place and the calendar of each stored window that names one."""
    return [(place, each["calendar"]) for place, each in enumerate(stored or ()) if "calendar" in each]


def compile_windows(
    stored: Iterable[Mapping[str, Any]] | None, calendars: CalendarsSpec
) -> tuple[SendWindow, ...]:  # fmt: skip
    """Return stored windows as values. A calendar that does not exist any more is replaced by the default one."""
    return tuple(_compile_window(each, calendars) for each in stored or ())


def _compile_window(stored: Mapping[str, Any], calendars: CalendarsSpec) -> SendWindow:
    days, named = stored["days"], calendars.by_key.get(stored.get("calendar", ""))
    begin, end = (int(stored[key][:2]) * 60 + int(stored[key][3:]) for key in ("from", "to"))
    weekdays = frozenset[int]().union(*(_SPANS.get(day) or _find_weekday(day) for day in days))
    return SendWindow(
        format_window(stored), weekdays, "working" in days, "free" in days, begin, end, named or calendars.default,
        named is not None, stored.get("timezone", ""),
    )  # fmt: skip


def _find_weekday(day: str) -> frozenset[int]:
    return frozenset({DAY_NAMES.index(day)} if day in DAY_NAMES else ())


# --- as a line ------------------------------------------------------------------------------------------------------


def format_window(stored: Mapping[str, Any]) -> str:
    """Return a stored window as a line."""
    options = [f"{name}={stored[name]}" for name in ("calendar", "timezone") if name in stored]
    return " ".join([",".join(_join_days(stored["days"])), f"{stored['from']}-{stored['to']}", *options])


def _join_days(days: Sequence[str]) -> Iterator[str]:
    """Yield the days; three or more weekdays in a row as `mon-fri`."""
    place = 0
    while place < len(days):
        end = place
        while end + 1 < len(days) and f"{days[end]} {days[end + 1]}" in " ".join((*DAY_NAMES, "mon")):
            end += 1
        if end - place >= 2:
            yield f"{days[place]}-{days[end]}"
            place = end + 1
        else:
            yield days[place]
            place += 1


def parse_window_line(line: str) -> dict[str, Any]:
    """Return the stored form of a line like `mon-fri 09:00-18:00` or `working 09:00-18:00 calendar=china`.

    Raises:
        ValueError: with the notation.
    """
    options = {_OPTION_NAMES.get(name, name): value for name, value in _OPTION.findall(line)}
    match = _LINE.fullmatch(_plain_notation(_OPTION.sub("", line)))
    if match is None:
        raise ValueError(_("must be like “mon-fri 09:00-18:00”, “working 09:00-18:00” or “daily 10:00-24:00”"))
    given = {"days": list(_read_days(match["days"])), "from": match["begin"], "to": match["end"], **options}
    try:
        return read_window(given)
    except InvalidInput as error:
        raise ValueError(error.errors[0].message) from None


def _plain_notation(text: str) -> str:
    """Replace the Chinese words and full-width signs that ops type."""
    plain = text.strip().lower()
    for typed, meant in {"工作日": "working", "休息日": "free", "每天": "daily", "周末": "weekend"}.items():
        plain = plain.replace(typed, meant)
    for place, sign in enumerate(_CHINESE_DAYS):
        plain = re.sub(f"(?:周|星期){sign}", DAY_NAMES[place], plain)
    return re.sub("[至到–—~－]", "-", plain).replace("：", ":").replace("，", ",").replace("、", ",")


def _read_days(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if part in DAYS:
            yield part
        elif first not in DAY_NAMES or last not in DAY_NAMES or not dash:
            raise ValueError(_("“%(part)s” is not a day; use %(known)s", part=part, known=", ".join(DAYS)))
        else:
            begin, end = DAY_NAMES.index(first), DAY_NAMES.index(last)
            yield from (DAY_NAMES[each % 7] for each in range(begin, end + 1 + 7 * (end < begin)))
