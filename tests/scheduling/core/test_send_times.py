"""Times of day, windows and working days, also where clocks change and holidays move working days (调休)."""

from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduling.policy.send_times import (
    DAY_CHOICES,
    OPENING_SPREAD,
    SPREAD,
    CalendarSpec,
    CalendarsSpec,
    TimingSpec,
    compile_windows,
    find_send_time,
    format_window,
    is_official_working_day,
    is_open,
    open_spans,
    parse_window_line,
)
from tests.support.tables import each_row

BERLIN, SHANGHAI = ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Shanghai")
ZONES = ["Europe/Berlin", "America/New_York", "Asia/Shanghai", "America/Havana", "Australia/Lord_Howe", "UTC"]
CALENDAR = CalendarSpec()
CHINA = CalendarSpec("china", days={date(2026, 12, 25): False, date(2026, 12, 26): True})


def read_windows(lines, calendar=CALENDAR):
    return compile_windows(map(parse_window_line, lines), CalendarsSpec({"china": CHINA}, calendar))


def timing(*windows, at="", not_before="", **changes):
    calendar = changes.pop("calendar", CALENDAR)
    return TimingSpec(
        calendar,
        at=time.fromisoformat(at) if at else None,
        not_before=time.fromisoformat(not_before) if not_before else None,
        windows=read_windows(windows, calendar),
        **changes,
    )


def due(spec, local, zone=SHANGHAI):
    """The chosen time, before it is spread."""
    base = datetime.fromisoformat(local).replace(tzinfo=zone).astimezone(UTC)
    found = find_send_time(spec, base, zone.key, "ann")
    steps = [what for what, _ in found.steps]
    start = next((at for what, at in reversed(found.steps) if what != "spread"), base)
    span = OPENING_SPREAD if "send_window" in steps else SPREAD if "not_before" in steps else timedelta(microseconds=1)
    assert start <= found.at < start + span
    return f"{start.astimezone(zone):%Y-%m-%d %H:%M}"


@each_row(
    "day, working",
    [
        ("2026-10-01", False), ("2026-10-10", True), ("2026-02-17", False), ("2026-05-09", True),
        ("2025-01-26", True), ("2024-02-04", True), ("2026-07-04", False), ("2026-07-06", True), ("2027-10-01", False),
    ],
)  # fmt: skip
def test_chinese_working_day_follows_announced_changes(day, working):
    assert is_official_working_day(date.fromisoformat(day), "CN") is working


@each_row(
    "day, local, expected",
    [
        ("any", "2026-07-03 09:00", "2026-07-03 10:00"),
        ("any", "2026-07-03 10:01", "2026-07-04 10:00"),
        ("next", "2026-07-03 09:00", "2026-07-04 10:00"),
        ("working", "2026-07-04 09:00", "2026-07-06 10:00"),
        ("next_working", "2026-07-03 09:00", "2026-07-06 10:00"),
        ("next_working", "2026-09-30 09:00", "2026-10-08 10:00"),  # over the National Day holidays
        ("next_working", "2026-10-09 09:00", "2026-10-10 10:00"),  # onto a Saturday worked instead
        ("next_working", "2026-12-24 09:00", "2026-12-26 10:00"),  # own days have precedence over the country
    ],
)
def test_time_of_day_moves_to_the_chosen_day(day, local, expected):
    assert due(timing(at="10:00", day=day, calendar=CHINA), local) == expected


@each_row(
    "windows, local, expected",
    [
        (["mon-fri 09:00-18:00"], "2026-07-03 12:00", "2026-07-03 12:00"),
        (["mon-fri 09:00-18:00"], "2026-07-03 18:00", "2026-07-06 09:00"),
        (["mon-fri 09:00-18:00", "sat 10:00-16:00"], "2026-07-03 18:00", "2026-07-04 10:00"),
        (["working 09:00-18:00"], "2026-09-30 20:00", "2026-10-08 09:00"),
        (["free 10:00-24:00"], "2026-07-03 12:00", "2026-07-04 10:00"),
        (["daily 20:00-24:00"], "2026-07-03 23:59", "2026-07-03 23:59"),
        # weekdays alone know no holidays; a named calendar does
        (["mon-fri 10:00-20:00"], "2026-10-01 09:00", "2026-10-01 10:00"),
        (["mon-fri 10:00-20:00 calendar=china"], "2026-10-01 09:00", "2026-10-08 10:00"),
        (["mon-fri 10:00-20:00 calendar=china"], "2026-10-09 21:00", "2026-10-10 10:00"),  # worked instead
        (["daily 10:00-20:00 calendar=china"], "2026-10-01 09:00", "2026-10-08 10:00"),  # Sunday the 4th is no weekend
        (["sat,sun 10:00-20:00 calendar=china"], "2026-10-08 09:00", "2026-10-10 10:00"),
        (["mon-fri 10:00-20:00 calendar=china"], "2026-12-25 09:00", "2026-12-26 10:00"),  # own days
        (["free 10:00-20:00 calendar=china"], "2026-12-24 09:00", "2026-12-25 10:00"),
        # a window in its own zone opens by that clock, the other by the customer's
        (["daily 10:00-20:00 timezone=Europe/Berlin", "daily 10:00-11:00"], "2026-07-03 12:00", "2026-07-03 16:00"),
        (["daily 10:00-20:00 timezone=Europe/Berlin", "daily 10:00-11:00"], "2026-07-03 05:00", "2026-07-03 10:00"),
    ],
)
def test_window_moves_to_its_next_start(windows, local, expected):
    assert due(timing(*windows), local) == expected


def test_time_of_day_is_exact_and_an_opening_is_spread_over_ten_minutes():
    base = datetime(2026, 7, 3, 0, 0, tzinfo=SHANGHAI)
    users = [str(number) for number in range(200)]
    assert {find_send_time(timing(at="10:00"), base, "", user).at.astimezone(SHANGHAI).hour for user in users} == {10}
    exact = {find_send_time(timing("daily 09:00-18:00", at="10:00"), base, "", user).at for user in users}
    assert exact == {datetime(2026, 7, 3, 10, tzinfo=SHANGHAI)}
    late = [find_send_time(timing("daily 10:00-18:00"), base, "", user).at for user in users]
    assert max(late) - min(late) > timedelta(minutes=8)
    assert max(late) < datetime(2026, 7, 3, 10, 10, tzinfo=SHANGHAI)


def test_not_before_waits_on_the_same_day_only():
    assert due(timing(not_before="10:00"), "2026-07-03 03:00") == "2026-07-03 10:00"
    assert due(timing(not_before="10:00"), "2026-07-03 23:00") == "2026-07-03 23:00"


@each_row(
    "spec, local, expected",
    [
        # on 29 March the clock jumps from 2 to 3, on 25 October it falls from 3 to 2
        (timing("daily 02:00-02:45"), "2026-03-28 12:00", "2026-03-30 00:00"),
        (timing("daily 02:15-04:00"), "2026-03-28 12:00", "2026-03-29 01:15"),
        (timing("daily 02:00-04:00"), "2026-10-24 12:00", "2026-10-25 00:00"),
        (timing(at="02:30"), "2026-03-28 12:00", "2026-03-29 01:30"),  # skipped: 03:30 summer time
        (timing(at="02:30"), "2026-10-24 12:00", "2026-10-25 00:30"),  # repeated: the first one
        (timing(at="10:00", day="next"), "2026-03-28 12:00", "2026-03-29 08:00"),
        (timing(at="10:00", day="next"), "2026-10-24 12:00", "2026-10-25 09:00"),
        (timing(not_before="02:30"), "2026-03-29 01:00", "2026-03-29 01:30"),
        (timing(not_before="10:00"), "2026-10-25 01:00", "2026-10-25 09:00"),
        (timing("daily 10:00-18:00", at="02:30"), "2026-10-24 20:00", "2026-10-25 09:00"),
    ],
)
def test_time_of_day_follows_the_wall_clock_where_clocks_change(spec, local, expected):
    base = datetime.fromisoformat(local).replace(tzinfo=BERLIN).astimezone(UTC)
    step = next(at for what, at in reversed(find_send_time(spec, base, BERLIN.key, "ann").steps) if what != "spread")
    assert f"{step.astimezone(UTC):%Y-%m-%d %H:%M}" == expected


def test_repeated_hour_opens_its_window_twice():
    spec, first = timing("daily 02:00-02:30"), datetime(2026, 10, 25, 0, 0, tzinfo=UTC)  # 02:00 summer time
    assert is_open(spec, BERLIN.key, first)
    assert is_open(spec, BERLIN.key, first + timedelta(hours=1))
    assert not is_open(spec, BERLIN.key, first + timedelta(minutes=30))
    assert find_send_time(spec, first + timedelta(minutes=40), BERLIN.key, "ann").at >= first + timedelta(hours=1)


@each_row(
    "typed, stored",
    [
        ("mon-fri 9:00-18:00", "mon-fri 09:00-18:00"),
        ("周一至周五 09:00-18:00", "mon-fri 09:00-18:00"),
        ("工作日 09：00-18：00", "working 09:00-18:00"),
        ("周六、周日 10:00 到 16:00", "sat,sun 10:00-16:00"),
        ("fri-mon 00:00-24:00", "fri-mon 00:00-24:00"),
        ("mon,wed-fri,working 8:00-9:00", "mon,wed-fri,working 08:00-09:00"),
        (
            "工作日 09:00-18:00 日历=china 时区=Europe/Berlin",
            "working 09:00-18:00 calendar=china timezone=Europe/Berlin",
        ),
    ],
)
def test_window_is_read_as_ops_type_it(typed, stored):
    assert format_window(parse_window_line(typed)) == stored
    assert parse_window_line(stored) == parse_window_line(typed)


@each_row(
    "typed",
    ["", "mon", "mon 9-18", "moon 09:00-18:00", "mon 18:00-09:00", "mon 09:00-24:01", "mon 09:61-10:00",
     "mon 09:00-10:00 timezone=Peking"],
)  # fmt: skip
def test_window_in_another_form_is_refused(typed):
    with pytest.raises(ValueError, match=r"must|is not"):
        parse_window_line(typed)


minutes = st.integers(min_value=0, max_value=1439)


@st.composite
def window_texts(draw):
    begin = draw(minutes)
    end = draw(st.integers(min_value=begin + 1, max_value=1440))
    days = draw(st.sampled_from(["daily", "weekend", "mon-fri", "sun", "working", "free", "sat-mon", "tue,thu"]))
    return f"{days} {begin // 60}:{begin % 60:02}-{end // 60}:{end % 60:02}"


instants = st.datetimes(datetime(2024, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@given(
    instants, st.lists(window_texts(), max_size=3), st.none() | st.times(), st.sampled_from(DAY_CHOICES),
    st.sampled_from(ZONES), st.text(max_size=5),
)  # fmt: skip
@example(datetime(2026, 10, 25, 0, 40, tzinfo=UTC), ["daily 2:00-2:30"], None, "any", "Europe/Berlin", "ann")
def test_found_time_is_open_and_never_early(base, windows, at, day, zone, user_id):
    wall = at.replace(tzinfo=None, second=0, microsecond=0) if at else None
    spec = TimingSpec(CALENDAR, at=wall, day=day, windows=read_windows(windows))
    found = find_send_time(spec, base, zone, user_id)
    assert found.at >= base
    assert is_open(spec, zone, found.at)
    assert found == find_send_time(spec, base, zone, user_id)
    again = find_send_time(TimingSpec(CALENDAR, windows=spec.windows), found.at, zone, user_id)
    assert again.at == found.at  # the guard of the send agrees with the plan
    if wall is not None and not windows:
        local = found.steps[0][1].astimezone(ZoneInfo(zone))
        assert not day.endswith("working") or CALENDAR.is_working(local.date())
        assert not day.startswith("next") or local.date() > base.astimezone(ZoneInfo(zone)).date()


@settings(max_examples=50)
@given(instants, st.lists(window_texts(), min_size=1, max_size=3), st.sampled_from(ZONES))
def test_no_minute_before_the_opening_is_open(base, windows, zone):
    """Except within the hour that a clock change skips: a window that would start in it starts later that day."""
    spec, local = timing(*windows), ZoneInfo(zone)
    start = next(iter(find_send_time(spec, base, zone, "ann").steps), ("", base))[1]
    probe = max(base, start - timedelta(hours=30)) + timedelta(minutes=1)
    while probe < start - timedelta(minutes=1):
        if is_open(spec, zone, probe):
            before = (probe - timedelta(hours=2)).astimezone(local).utcoffset()
            assert before != probe.astimezone(local).utcoffset(), (probe, start)
        probe += timedelta(minutes=7)


def test_open_spans_follow_working_days_and_join():
    since = datetime(2026, 9, 30, 12, tzinfo=SHANGHAI)
    spans = open_spans(
        timing("working 09:00-12:00", "working 12:00-18:00", "free 20:00-24:00"), SHANGHAI.key, since, 10
    )
    shown = [f"{begin.astimezone(SHANGHAI):%m-%d %H:%M} {end.astimezone(SHANGHAI):%m-%d %H:%M}" for begin, end in spans]
    assert shown == [
        "09-30 09:00 09-30 18:00",
        *(f"10-0{day} 20:00 10-{day + 1:02} 00:00" for day in range(1, 8)),
        "10-08 09:00 10-08 18:00", "10-09 09:00 10-09 18:00",
    ]  # fmt: skip


@each_row("day", ["2026-03-29", "2026-10-25"])
def test_open_spans_agree_with_is_open_where_clocks_change(day):
    spec = timing("daily 01:00-05:00", "daily 22:00-24:00")
    since = datetime.fromisoformat(day).replace(tzinfo=BERLIN).astimezone(UTC)
    spans = open_spans(spec, BERLIN.key, since, 2)
    for minutes in range(0, 24 * 60, 10):
        at = since + timedelta(minutes=minutes)
        assert is_open(spec, BERLIN.key, at) is any(begin <= at < end for begin, end in spans), at.astimezone(BERLIN)
