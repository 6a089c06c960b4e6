from __future__ import annotations

from datetime import timedelta

from hypothesis import example, given
from hypothesis import strategies as st

from scheduling.channels.base import Delivered, Unknown
from scheduling.channels.http_client import LONGEST_RETRY_AFTER, Response, excerpt, judge_status, parse_retry_after


@given(st.text(max_size=60) | st.from_regex(r"[A-Z][a-z]{2}, \d{1,9} [A-Z][a-z]{2} \d{1,9} [0-9:]{1,12} [-+]\d{1,9}"))
@example("Mon, 01 Jan 0001 00:00:00 +2359")
@example("Fri, 31 Dec 9999 23:59:59 -2359")
@example("٣")
@example("0" * 5000 + "7")
def test_retry_after_is_at_most_a_day(value: str) -> None:
    wait = parse_retry_after(Response(503, {"retry-after": value}))

    assert wait is None or timedelta(0) <= wait <= LONGEST_RETRY_AFTER


@given(st.integers(min_value=200, max_value=999), st.booleans())
def test_judge_status_handles_every_status(status: int, repeatable: bool) -> None:
    outcome = judge_status(Response(status), repeatable=repeatable)

    assert isinstance(outcome, Delivered) is (status < 300)
    if repeatable:
        assert isinstance(outcome, Unknown) is (status in (502, 504))


def test_excerpt_can_be_stored() -> None:
    assert excerpt("a\x00b\ud800c") == "a\N{REPLACEMENT CHARACTER}b?c"
    assert excerpt(b"a\x00b\xed\xa0\x80") == "a\N{REPLACEMENT CHARACTER}b" + "\N{REPLACEMENT CHARACTER}" * 3
    assert len(excerpt("x" * 5000)) == len(excerpt(b"x" * 5000)) == 1000
