"""Quiet hours end when people there get up, also in the nights in which the clocks change."""

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

from hypothesis import example, given
from hypothesis import strategies as st

from scheduling.policy.guards import quiet_until
from scheduling.policy.specs import RuleSpec
from tests.support.tables import each_row

BERLIN, NEW_YORK, SHANGHAI = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("Asia/Shanghai")
ZONES = [BERLIN, NEW_YORK, SHANGHAI, ZoneInfo("America/Havana"), ZoneInfo("Australia/Lord_Howe"), ZoneInfo("UTC")]


def hours(begin, end):
    return RuleSpec(1, "quiet_hours", 1, quiet_from=time.fromisoformat(begin), quiet_to=time.fromisoformat(end))


def at(zone, local, *, fold=0):
    return datetime.fromisoformat(local).replace(tzinfo=zone, fold=fold).astimezone(UTC)


@each_row(
    "span, local, ends",
    [
        (("22:00", "08:00"), "2026-05-05 22:00", "2026-05-06 08:00"),
        (("22:00", "08:00"), "2026-05-06 00:00", "2026-05-06 08:00"),
        (("22:00", "08:00"), "2026-05-06 07:59:59", "2026-05-06 08:00"),
        (("22:00", "08:00"), "2026-05-06 08:00", None),
        (("22:00", "08:00"), "2026-05-05 21:59:59", None),
        (("12:00", "14:00"), "2026-05-05 12:00", "2026-05-05 14:00"),
        (("12:00", "14:00"), "2026-05-05 14:00", None),
        (("22:00", "00:00"), "2026-12-31 23:30", "2027-01-01 00:00"),
        (("22:00", "00:00"), "2027-01-01 00:00", None),
        (("09:00", "09:00"), "2026-05-05 09:00", None),
    ],
)
def test_quiet_hours_include_start_and_exclude_end(span, local, ends):
    assert quiet_until(hours(*span), BERLIN, at(BERLIN, local)) == (at(BERLIN, ends) if ends else None)


@each_row(
    "zone, night, morning, wait",
    [
        (BERLIN, "2026-03-28 22:00", "2026-03-29 08:00", 9),  # the clock jumps from 2 to 3
        (BERLIN, "2026-10-24 22:00", "2026-10-25 08:00", 11),  # and falls from 3 to 2
        (NEW_YORK, "2026-03-07 22:00", "2026-03-08 08:00", 9),
        (SHANGHAI, "2026-03-28 22:00", "2026-03-29 08:00", 10),  # no clock changes there
    ],
)
def test_quiet_hours_end_at_local_time_across_dst(zone, night, morning, wait):
    until = quiet_until(hours("22:00", "08:00"), zone, at(zone, night))
    assert until == at(zone, morning)
    assert until - at(zone, night) == timedelta(hours=wait)


def test_quiet_hours_repeated_end_means_the_second():
    rule, end = hours("22:00", "02:30"), "2026-10-25 02:30"
    assert quiet_until(rule, BERLIN, at(BERLIN, end) - timedelta(minutes=15)) == at(BERLIN, end, fold=1)
    assert quiet_until(rule, BERLIN, at(BERLIN, end, fold=1)) is None


def test_quiet_hours_missing_end_moves_past_the_gap():
    until = quiet_until(hours("22:00", "02:30"), BERLIN, at(BERLIN, "2026-03-29 01:00"))
    assert until == at(BERLIN, "2026-03-29 03:30")


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
def test_quiet_until_is_not_quiet_and_within_a_day(begin, end, zone, now):
    rule = RuleSpec(1, "quiet_hours", 1, quiet_from=begin, quiet_to=end)

    until = quiet_until(rule, zone, now)

    if until is not None:
        span = (datetime.combine(now, end) - datetime.combine(now, begin)) % timedelta(days=1)
        free = timedelta(days=1) - span
        skipped = timedelta(days=1) if free <= timedelta(hours=1) else timedelta(0)
        assert now < until <= now + span + skipped + timedelta(hours=2), "an hour that comes twice, and no more"
        assert quiet_until(rule, zone, until) is None
