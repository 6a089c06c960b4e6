"""Find the instant of a touch: at a time of day, not before a time, inside send windows, on working days. Pure.

Wall clocks are those of the customer's zone, or of a window's own. A time that a clock change skips happens after the
change; a repeated time happens at its first occurrence. A window is open whenever the wall clock is inside it.

Working days are weekdays without public holidays, plus the weekend days worked instead (调休), plus own days.

A send window is a mapping in files and rows, and a line that operators type.

Mapping: `{"days": ["mon", "tue"], "from": "10:00", "to": "20:00", "calendar": "china", "timezone": "customer"}`.
Line: `mon-fri 10:00-20:00 calendar=china timezone=Asia/Shanghai`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from functools import cache, lru_cache
from typing import Any, NamedTuple
from zlib import crc32
from zoneinfo import ZoneInfo, available_timezones

from scheduling.error_text import ErrorText as _
from scheduling.errors import ErrorCollector, InvalidInput


@cache
def _load_holidays(country: str) -> Any:
    """Return the public holidays of a country. The import takes 0.4 s, so it waits for the first question."""
    from holidays import country_holidays

    return country_holidays(country)


def is_country(country: str) -> bool:
    """Return whether the holidays of this country are known."""
    from holidays import list_supported_countries

    return country in list_supported_countries()


@lru_cache(maxsize=4096)
def is_official_working_day(day: date, country: str) -> bool:
    """Return whether people work on this day. Without a country every weekday is a working day.

    China announces 调休 days each November. Until the library has them, its weekends are free.
    """
    return bool(_load_holidays(country).is_working_day(day)) if country else day.weekday() < 5


@lru_cache(maxsize=4096)
def is_holiday(day: date, country: str) -> bool:
    """Return whether this is a public holiday, a weekday that is free because of one, or a weekend day between two."""
    if not country:
        return False
    return _is_free_for_holiday(day, country) or (
        not is_official_working_day(day, country)
        and all(_is_free_for_holiday(day + timedelta(days=step), country) for step in (-1, 1))
    )


def _is_free_for_holiday(day: date, country: str) -> bool:
    return day in _load_holidays(country) or (day.weekday() < 5 and not is_official_working_day(day, country))


SPREAD = timedelta(minutes=2)  #: over which touches start after `not_before`, and when quiet hours end
OPENING_SPREAD = timedelta(minutes=10)  #: over which touches start when a send window opens
SEARCHED_DAYS = 400
WORK_WEEK = frozenset(range(5))
DAY_CHOICES = ("any", "next", "working", "next_working")


@dataclass(frozen=True, slots=True)
class CalendarSpec:
    key: str = ""
    timezone: str = "Asia/Shanghai"  #: for customers without one
    country: str = "CN"
    days: Mapping[date, bool] = field(default_factory=dict)  #: own days: True is open, False is closed

    def is_working(self, day: date) -> bool:
        own = self.days.get(day)
        return is_official_working_day(day, self.country) if own is None else own

    def is_closed(self, day: date) -> bool:
        """Return whether it is an own closed day or a public holiday. An ordinary weekend is not."""
        own = self.days.get(day)
        return is_holiday(day, self.country) if own is None else not own


@dataclass(frozen=True, slots=True)
class SendWindow:
    """Days and hours in which touches may be sent. The end is excluded; 1440 is midnight.

    A window that names its calendar is closed on that calendar's holidays. With Monday to Friday among its days, it is
    also open on weekend days that the calendar makes working days.
    """

    text: str  #: for people: `mon-fri 09:00-18:00`
    weekdays: frozenset[int]
    working: bool  #: also on working days of the calendar
    free: bool  #: also on its other days
    begin: int  #: minutes since midnight
    end: int
    calendar: CalendarSpec
    follows: bool = False  #: it names its calendar
    timezone: str = ""  #: IANA; empty: the customer's

    def zone_of(self, timezone: str) -> ZoneInfo:
        """Return the zone of its wall clock for a customer of this time zone."""
        return ZoneInfo(self.timezone or timezone or self.calendar.timezone)

    def applies_on(self, day: date) -> bool:
        calendar, weekday = self.calendar, day.weekday()
        if weekday in self.weekdays and not (self.follows and calendar.is_closed(day)):
            return True
        if self.follows and weekday > 4 and self.weekdays >= WORK_WEEK and calendar.is_working(day):
            return True
        return (self.working or self.free) and (self.working if calendar.is_working(day) else self.free)

    def is_open(self, timezone: str, instant: datetime) -> bool:
        local = instant.astimezone(self.zone_of(timezone))
        return self.begin <= local.hour * 60 + local.minute < self.end and self.applies_on(local.date())

    def next_start(self, timezone: str, instant: datetime) -> datetime | None:
        """Return its first start after an instant, or None if there is none within `SEARCHED_DAYS`."""
        zone = self.zone_of(timezone)
        first = instant.astimezone(zone).date()
        for day in (first + timedelta(days=offset) for offset in range(SEARCHED_DAYS)):
            if self.applies_on(day):
                for fold in (0, 1):
                    start = _instant(day, time(self.begin // 60, self.begin % 60), zone, fold=fold)
                    if start > instant and self.is_open(timezone, start):
                        return start
        return None


@dataclass(frozen=True, slots=True)
class CalendarsSpec:
    by_key: Mapping[str, CalendarSpec] = field(default_factory=dict)
    default: CalendarSpec = field(default_factory=CalendarSpec)
    windows: tuple[SendWindow, ...] = ()  #: of nodes without own windows


@dataclass(frozen=True, slots=True)
class TimingSpec:
    """When touches of a node may be sent, besides its delay."""

    calendar: CalendarSpec  #: of `day`, and the zone of customers without one
    at: time | None = None
    day: str = "any"  #: for `at`: one of `DAY_CHOICES`
    not_before: time | None = None
    windows: tuple[SendWindow, ...] = ()

    def zone_of(self, timezone: str) -> ZoneInfo:
        return ZoneInfo(timezone or self.calendar.timezone)


EXPIRY_MARGIN = timedelta(seconds=10)  #: before a touch expires: time to dispatch and judge it


class SendTime(NamedTuple):
    """An instant with the steps that led to it: `at`, `not_before`, `send_window`, `spread`, and where it moved to."""

    at: datetime
    steps: tuple[tuple[str, datetime], ...] = ()


def spread_for(user_id: str, span: timedelta = SPREAD) -> timedelta:
    """Return a part of `span`, the same one for all touches of a customer.

    Otherwise all touches that waited for an hour are due at one moment. With an instant for each touch, one of low
    priority could take the cap slot of a later one.
    """
    return span * (crc32(user_id.encode()) % 1_000 / 1_000)


def find_send_time(timing: TimingSpec, base: datetime, timezone: str, user_id: str) -> SendTime:
    """Return when a touch is due whose delay ends at `base`. Never earlier than `base`."""
    zone = timing.zone_of(timezone)
    steps: list[tuple[str, datetime]] = []
    due_at, span = base, timedelta(0)
    if timing.at is not None:
        due_at = _next_time_of_day(timing, zone, base)
        steps.append(("at", due_at))
    elif timing.not_before is not None:
        earliest = _instant(base.astimezone(zone).date(), timing.not_before, zone)
        if base < earliest and base.astimezone(zone).time() < timing.not_before:
            due_at, span = earliest, SPREAD
            steps.append(("not_before", due_at))
    if not is_open(timing, timezone, due_at) and (start := next_opening(timing, timezone, due_at)) > due_at:
        due_at, span = start, OPENING_SPREAD
        steps.append(("send_window", due_at))
    if span:
        due_at = spread_opening(timing, timezone, due_at, user_id, span)
        steps.append(("spread", due_at))
    return SendTime(due_at.astimezone(UTC), tuple(steps)) if steps else SendTime(base)


def spread_opening(
    timing: TimingSpec, timezone: str, start: datetime, user_id: str, span: timedelta = OPENING_SPREAD
) -> datetime:
    """Return an instant up to `span` after a start, if a window is still open then."""
    later = start + spread_for(user_id, span)
    return later if is_open(timing, timezone, later) else start


def is_open(timing: TimingSpec, timezone: str, instant: datetime) -> bool:
    """Return whether one of the windows is open. Without windows every instant is."""
    return not timing.windows or any(window.is_open(timezone, instant) for window in timing.windows)


def next_opening(timing: TimingSpec, timezone: str, instant: datetime) -> datetime:
    """Return the next start of a window after an instant outside of all.

    If none opens within `SEARCHED_DAYS`, return `instant`, so that no touch waits for good.
    """
    starts = (window.next_start(timezone, instant) for window in timing.windows)
    return min((start for start in starts if start is not None), default=instant)


def open_spans(timing: TimingSpec, timezone: str, since: datetime, days: int) -> list[tuple[datetime, datetime]]:
    """Return when the windows are open from the day of `since` on, in order. Spans that touch or overlap are joined."""
    found = []
    for window in timing.windows:
        zone = window.zone_of(timezone)
        first = since.astimezone(zone).date()
        for day in (first + timedelta(days=number) for number in range(days)):
            if window.applies_on(day):
                found.append((_at_minute(day, window.begin, zone), _at_minute(day, window.end, zone)))
    spans: list[tuple[datetime, datetime]] = []
    for begin, end in sorted(found):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans


def _at_minute(day: date, minute: int, zone: ZoneInfo) -> datetime:
    return _instant(day + timedelta(days=minute // 1440), time(minute % 1440 // 60, minute % 60), zone)


def _next_time_of_day(timing: TimingSpec, zone: ZoneInfo, base: datetime) -> datetime:
    assert timing.at is not None
    first = base.astimezone(zone).date() + timedelta(days=timing.day.startswith("next"))
    for offset in range(SEARCHED_DAYS):
        day = first + timedelta(days=offset)
        if timing.day.endswith("working") and not timing.calendar.is_working(day):
            continue
        found = _instant(day, timing.at, zone)
        if found >= base:
            return found
    return base


def _instant(day: date, wall: time, zone: ZoneInfo, *, fold: int = 0) -> datetime:
    return datetime.combine(day, wall.replace(fold=fold), tzinfo=zone).astimezone(UTC)


# --- forms of a window ------------------------------------------------------------------------------------------------


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
    """Return whether this is the name of an IANA time zone. Others of the system, such as `right/UTC`, are none."""
    return name in _time_zones()


_time_zones = cache(available_timezones)  # it reads all files of the database


def check_windows(given: Any, found: ErrorCollector, field: str) -> None:
    if not isinstance(given, list) or len(given) > MOST_WINDOWS:
        found.add(field, _("must be a list of at most %(most)s windows", most=MOST_WINDOWS))
        return
    for place, each in enumerate(given):
        with found.within(f"{field}[{place}]"):
            read_window(each)


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


def compile_windows(stored: Iterable[Mapping[str, Any]] | None, calendars: CalendarsSpec) -> tuple[SendWindow, ...]:
    """Return stored windows as values. A calendar that does not exist any more is replaced by the default one."""
    return tuple(_compile_window(each, calendars) for each in stored or ())


def _compile_window(stored: Mapping[str, Any], calendars: CalendarsSpec) -> SendWindow:
    days, named = stored["days"], calendars.by_key.get(stored.get("calendar", ""))
    begin, end = (int(stored[key][:2]) * 60 + int(stored[key][3:]) for key in ("from", "to"))
    single_days = frozenset(number for number, name in enumerate(DAY_NAMES) if name in days)
    weekdays = single_days.union(*(_SPANS.get(day, frozenset()) for day in days))
    return SendWindow(
        format_window(stored), weekdays, "working" in days, "free" in days, begin, end, named or calendars.default,
        named is not None, stored.get("timezone", ""),
    )  # fmt: skip


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
    # Replace the Chinese words and full-width signs that ops type.
    plain = _OPTION.sub("", line).strip().lower()
    for typed, meant in {"工作日": "working", "休息日": "free", "每天": "daily", "周末": "weekend"}.items():
        plain = plain.replace(typed, meant)
    for place, sign in enumerate(_CHINESE_DAYS):
        plain = re.sub(f"(?:周|星期){sign}", DAY_NAMES[place], plain)
    plain = re.sub("[至到–—~－]", "-", plain).replace("：", ":").replace("，", ",").replace("、", ",")
    match = _LINE.fullmatch(plain)
    if match is None:
        raise ValueError(_("must be like “mon-fri 09:00-18:00”, “working 09:00-18:00” or “daily 10:00-24:00”"))
    given = {"days": list(_read_days(match["days"])), "from": match["begin"], "to": match["end"], **options}
    try:
        return read_window(given)
    except InvalidInput as error:
        raise ValueError(error.errors[0].message) from None


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
