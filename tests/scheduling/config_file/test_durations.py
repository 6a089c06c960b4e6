from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.durations import YEAR, format_duration, from_seconds, parse_duration, to_seconds
from tests.support.tables import each_row


@each_row(
    "text, span",
    [
        ("0", timedelta(0)),
        (0, timedelta(0)),
        ("250ms", timedelta(milliseconds=250)),
        ("45s", timedelta(seconds=45)),
        ("2w", timedelta(weeks=2)),
        ("1h30m", timedelta(minutes=90)),
        (" 1d12h ", timedelta(hours=36)),
        ("365d", YEAR),
    ],
)
def test_parse_duration_reads_valid_text(text, span):
    assert parse_duration(text) == span


@each_row(
    "text, problem",
    [
        *((text, "is not a duration") for text in ("", "15", 15, False, "1.5h", "1y", "１５m")),
        ("-15m", "must not be negative"),
        ("30m1h", "must name each unit once, the largest first"),
        ("1h1h", "must name each unit once, the largest first"),
        ("366d", "must not be longer than a year"),
        ("999999999999999999d", "must not be longer than a year"),
    ],
)
def test_parse_duration_refuses_invalid_text(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_duration(text)


@given(st.timedeltas(min_value=timedelta(0), max_value=YEAR))
def test_duration_round_trips(span):
    assert parse_duration(format_duration(span)) == span
    assert from_seconds(to_seconds(span)) == span


def test_format_duration_is_short():
    assert [format_duration(timedelta(minutes=m)) for m in (7 * 24 * 60, 90, 0)] == ["7d", "1h30m", "0"]
