from datetime import timedelta

from hypothesis import example, given
from hypothesis import strategies as st

from scheduling.channels.http_client import LONGEST_RETRY_AFTER, Response, excerpt, parse_retry_after


@given(st.text(max_size=60) | st.from_regex(r"[A-Z][a-z]{2}, \d{1,9} [A-Z][a-z]{2} \d{1,9} [0-9:]{1,12} [-+]\d{1,9}"))
@example("Mon, 01 Jan 0001 00:00:00 +2359")
@example("Fri, 31 Dec 9999 23:59:59 -2359")
@example("٣")
@example("0" * 5000 + "7")
def test_retry_after_is_at_most_a_day(value):
    wait = parse_retry_after(Response(503, {"retry-after": value}))

    assert wait is None or timedelta(0) <= wait <= LONGEST_RETRY_AFTER


def test_excerpt_can_be_stored():
    assert excerpt("a\x00b\ud800c") == "a\N{REPLACEMENT CHARACTER}b?c"
    assert excerpt(b"a\x00b\xed\xa0\x80") == "a\N{REPLACEMENT CHARACTER}b" + "\N{REPLACEMENT CHARACTER}" * 3
    assert len(excerpt("x" * 5000)) == len(excerpt(b"x" * 5000)) == 1000
