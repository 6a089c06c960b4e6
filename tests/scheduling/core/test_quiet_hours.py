"""Quiet hours end when people there get up, also in the nights in which the clocks change."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

from hypothesis import example, given
from hypothesis import strategies as st

from scheduling.policy.guards import quiet_until
from scheduling.policy.specs import RuleSpec
from tests.support.tables import each_row

BERLIN, NEW_YORK, SHANGHAI = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("Asia/Shanghai")
ZONES = [BERLIN, NEW_YORK, SHANGHAI, ZoneInfo("America/Havana"), ZoneInfo("Australia/Lord_Howe"), ZoneInfo("UTC")]


def hours(begin: str, end: str) -> RuleSpec:
    return RuleSpec(1, "quiet_hours", 1, quiet_from=time.fromisoformat(begin), quiet_to=time.fromisoformat(end))


def at(zone: ZoneInfo, local: str, *, fold: int = 0) -> datetime:
    return datetime.fromisoformat(local).replace(tzinfo=zone, fold=fold).astimezone(UTC)


@each_row(
    "span, local, ends",
    [
        (("22:00", "08:00"), "2026-05-05 22:00", "2026-05-06 08:00"),
        (("22:00", "08:00"), "2026-05-05 23:59:59", "2026-05-06 08:00"),
        (("22:00", "08:00"), "2026-05-06 00:00", "2026-05-06 08:00"),
        (("22:00", "08:00"), "2026-05-06 07:59:59", "2026-05-06 08:00"),
        (("22:00", "08:00"), "2026-05-06 08:00", None),
        (("22:00", "08:00"), "2026-05-05 21:59:59", None),
        (("12:00", "14:00"), "2026-05-05 12:00", "2026-05-05 14:00"),
        (("12:00", "14:00"), "2026-05-05 14:00", None),
        (("12:00", "14:00"), "2026-05-05 11:59", None),
        (("22:00", "00:00"), "2026-12-31 23:30", "2027-01-01 00:00"),
        (("22:00", "00:00"), "2027-01-01 00:00", None),
        (("09:00", "09:00"), "2026-05-05 09:00", None),
    ],
)
@each_row("zone", [SHANGHAI, BERLIN, NEW_YORK])
def test_quiet_hours_include_start_and_exclude_end(
    zone: ZoneInfo, span: tuple[str, str], local: str, ends: str | None
) -> None:
    assert quiet_until(hours(*span), zone, at(zone, local)) == (at(zone, ends) if ends else None)


@each_row(
    "zone, night, morning, wait",
    [
        (BERLIN, "2026-03-28 22:00", "2026-03-29 08:00", 9),  # the clock jumps from 2 to 3
        (BERLIN, "2026-10-24 22:00", "2026-10-25 08:00", 11),  # and falls from 3 to 2
        (NEW_YORK, "2026-03-07 22:00", "2026-03-08 08:00", 9),
        (NEW_YORK, "2026-10-31 22:00", "2026-11-01 08:00", 11),
        (SHANGHAI, "2026-03-28 22:00", "2026-03-29 08:00", 10),  # no clock changes there
    ],
)
def test_quiet_hours_end_at_local_time_across_dst(zone: ZoneInfo, night: str, morning: str, wait: int) -> None:
    until = quiet_until(hours("22:00", "08:00"), zone, at(zone, night))
    assert until == at(zone, morning)
    assert until - at(zone, night) == timedelta(hours=wait)


@each_row("zone, day", [(BERLIN, "2026-10-25"), (NEW_YORK, "2026-11-01")])
def test_quiet_hours_repeated_end_means_the_second(zone: ZoneInfo, day: str) -> None:
    twice = "02:30" if zone is BERLIN else "01:30"
    rule = hours("22:00", twice)
    first_hour = at(zone, f"{day} {twice}") - timedelta(minutes=15)

    assert quiet_until(rule, zone, first_hour) == at(zone, f"{day} {twice}", fold=1)
    assert quiet_until(rule, zone, at(zone, f"{day} {twice}", fold=1)) is None


@each_row("zone, day, never", [(BERLIN, "2026-03-29", "02:30"), (NEW_YORK, "2026-03-08", "02:30")])
def test_quiet_hours_missing_end_moves_past_the_gap(zone: ZoneInfo, day: str, never: str) -> None:
    until = quiet_until(hours("22:00", never), zone, at(zone, f"{day} 01:00"))
    assert until == at(zone, f"{day} 03:30")


minutes = st.integers(0, 24 * 60 - 1).map(lambda minute: time(minute // 60, minute % 60))
# Days around the changes of clocks are worth more than others.
CHANGES = ["2026-03-08", "2026-03-29", "2026-10-25", "2026-11-01"]
instants = st.integers(0, 10**9).map(lambda second: at(SHANGHAI, "2005-01-01") + timedelta(seconds=second)) | st.builds(
    lambda day, second: at(BERLIN, day) + timedelta(seconds=second),
    st.sampled_from(CHANGES),
    st.integers(-2 * 86400, 2 * 86400),
)


@given(minutes, minutes, st.sampled_from(ZONES), instants)
@example(time(1, 45), time(2, 15), BERLIN, datetime(2026, 10, 25, 0, 0, tzinfo=UTC))
@example(time(2, 1), time(2, 0), BERLIN, datetime(2026, 3, 28, 12, 0, tzinfo=UTC))  # the free minute is skipped
def test_quiet_until_is_not_quiet_and_within_a_day(begin: time, end: time, zone: ZoneInfo, now: datetime) -> None:
    rule = RuleSpec(1, "quiet_hours", 1, quiet_from=begin, quiet_to=end)

    until = quiet_until(rule, zone, now)

    if until is not None:
        span = (datetime.combine(now, end) - datetime.combine(now, begin)) % timedelta(days=1)
        free = timedelta(days=1) - span
        skipped = timedelta(days=1) if free <= timedelta(hours=1) else timedelta(0)
        assert now < until <= now + span + skipped + timedelta(hours=2), "an hour that comes twice, and no more"
        assert quiet_until(rule, zone, until) is None


@given(minutes, minutes, st.sampled_from(ZONES), instants)
def test_quiet_hours_leave_a_free_minute_each_day(begin: time, end: time, zone: ZoneInfo, now: datetime) -> None:
    rule = RuleSpec(1, "quiet_hours", 1, quiet_from=begin, quiet_to=end)
    until = quiet_until(rule, zone, now) or now
    free = (datetime.combine(now, begin) - datetime.combine(now, end)) % timedelta(days=1)
    days = 2 if free <= timedelta(hours=1) else 1  # a night may skip an hour
    assert until.astimezone(zone).date() <= now.astimezone(zone).date() + timedelta(days=days)
