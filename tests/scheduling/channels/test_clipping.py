import json

from hypothesis import given
from hypothesis import strategies as st

from scheduling.channels.robots import clip_text, utf8_size
from tests.support.tables import each_row

FAMILY = "👩‍👩‍👧"  # 18 bytes: three women and girls held together by two joiners
FLAG = "🇨🇳"  # 8 bytes: two halves


@each_row(
    "text, limit, clipped",
    [
        ("您好", 6, "您好"),
        ("您好您好", 9, "您好…"),
        ("您好您好", 11, "您好…"),
        ("您好", 3, "…"),
        ("您好", 2, ""),
        ("a" + FAMILY + FAMILY, 1 + 18 + 17, "a" + FAMILY + "…"),
        ("a" + FAMILY, 18, "a…"),
        ("ae\u0301" + "x" * 9, 1 + 1 + 3, "a…"),
        ("a👍🏽" + "x" * 9, 1 + 4 + 3, "a…"),
        (FLAG + FLAG + "x" * 9, 8 + 4 + 3, FLAG + "…"),
    ],
)
def test_clip_text_counts_bytes_and_keeps_characters_whole(text, limit, clipped):
    assert clip_text(text, limit) == clipped


def test_clip_text_cuts_endless_combining_marks():
    assert clip_text("a" + "\u0301" * 1000, 500).endswith("…")


@given(st.text(max_size=200), st.integers(min_value=0, max_value=400))
def test_clip_text_fits_and_is_a_prefix(text, limit):
    clipped = clip_text(text, limit)

    assert utf8_size(clipped) <= limit
    assert clipped == text or text.startswith(clipped.removesuffix("…"))
    clipped.encode()


@given(st.text(alphabet='a"\\\n\x01👩', max_size=200), st.integers(min_value=10, max_value=400))
def test_clip_text_fits_a_custom_size_function(text, limit):
    def size(body):
        return len(json.dumps(body, ensure_ascii=False).encode())

    assert size(clip_text(text, limit, size)) <= limit
