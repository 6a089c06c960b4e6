"""Cutting a text to a vendor's limit, which counts bytes, without breaking what a reader sees as one character."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

ELLIPSIS = "…"
JOINER = "\u200d"
LONGEST_CLUSTER = 32  # code points to give up for a whole character; longer ones are not language


def utf8_size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def clip(text: str, limit: int, size: Callable[[str], int] = utf8_size) -> str:
    """`text`, or its longest beginning that fits with a final …; `size` must grow with the text and count ≥ 1 a letter.

    Returns "" where not even the … fits.
    """
    if len(text) <= limit and size(text) <= limit:
        return text
    low, high = 0, min(len(text), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if size(text[:middle] + ELLIPSIS) <= limit:
            low = middle
        else:
            high = middle - 1
    clipped = text[: _whole(text, low)] + ELLIPSIS
    return clipped if size(clipped) <= limit else ""


def _whole(text: str, end: int) -> int:
    """The nearest place up to `end` that is not inside a character: a family emoji, a flag, a letter with marks."""
    for place in range(end, max(end - LONGEST_CLUSTER, 0), -1):
        if not _inside(text, place):
            return place
    return end


def _inside(text: str, place: int) -> bool:
    if not 0 < place < len(text):
        return False
    before, after = text[place - 1], text[place]
    if JOINER in (before, after) or _extends(after):
        return True
    return _is_flag_half(before) and _is_flag_half(after) and _flag_halves_before(text, place) % 2 == 1


def _extends(character: str) -> bool:
    """Combining marks, variation selectors, skin tones and tag characters belong to what stands before them."""
    return (
        unicodedata.category(character) in {"Mn", "Me", "Mc"}
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or "\U000e0020" <= character <= "\U000e007f"
    )


def _is_flag_half(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _flag_halves_before(text: str, place: int) -> int:
    start = place
    while start > 0 and place - start < LONGEST_CLUSTER and _is_flag_half(text[start - 1]):
        start -= 1
    return place - start
