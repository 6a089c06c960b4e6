from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.durations import YEAR, format_duration, from_seconds, parse_duration, to_seconds


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("0", timedelta(0)),
        (0, timedelta(0)),
        ("0s", timedelta(0)),
        ("250ms", timedelta(milliseconds=250)),
        ("45s", timedelta(seconds=45)),
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
        ("2w", timedelta(weeks=2)),
        ("1h30m", timedelta(minutes=90)),
        (" 1d12h ", timedelta(hours=36)),
        ("365d", YEAR),
    ],
)
def test_parse_duration_reads_valid_text(text: str, span: timedelta) -> None:
    assert parse_duration(text) == span


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "“” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        ("15", "“15” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        (15, "“15” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        (False, "“False” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        ("1.5h", "“1.5h” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        ("1y", "“1y” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        ("１５m", "“１５m” is not a duration; write it like 15m, 2h, 7d or 1h30m"),
        ("-15m", "must not be negative"),
        ("30m1h", "“30m1h” must name each unit once, the largest first"),
        ("1h1h", "“1h1h” must name each unit once, the largest first"),
        ("366d", "must not be longer than a year (365d)"),
        ("999999999999999999d", "must not be longer than a year (365d)"),
    ],
)
def test_parse_duration_refuses_invalid_text(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_duration(text)
    assert str(error.value) == message


@given(st.timedeltas(min_value=timedelta(0), max_value=YEAR))
def test_duration_round_trips(span: timedelta) -> None:
    assert parse_duration(format_duration(span)) == span
    assert from_seconds(to_seconds(span)) == span


def test_format_duration_is_short() -> None:
    assert format_duration(timedelta(days=7)) == "7d"
    assert format_duration(timedelta(minutes=90)) == "1h30m"
    assert format_duration(timedelta(0)) == "0"
