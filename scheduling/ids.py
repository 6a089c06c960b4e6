"""Create ids that sort by their creation time, so that an index grows at its end. Refuse ids that many people share."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from hashlib import sha256
from uuid import UUID

from uuid_utils.compat import uuid7

from scheduling.error_text import ErrorText as _

MAX_CLOCK_LAG = timedelta(minutes=5)  #: more than the clock of any API node is behind


def new_id() -> UUID:
    return uuid7()


def parse_uuid(text: str) -> UUID | None:
    try:
        return UUID(text.strip())
    except ValueError:
        return None


def parse_number(text: str) -> int | None:
    """Return the number of an address, such as a primary key; None for a text that is none or too long for one."""
    return int(text) if text.isdecimal() and len(text) < 19 else None


def first_id_at(instant: datetime) -> UUID:
    """Return the lowest id that can be created at an instant, to the millisecond. No id is older than 1970."""
    return UUID(int=max(int(instant.timestamp() * 1000), 0) << 80)


def derive_id(key: str, instant: datetime) -> UUID:
    """Return an id that is always the same for this key. It sorts by the instant, to the millisecond."""
    digest = int.from_bytes(sha256(key.encode()).digest()[:10])
    # The layout of UUIDv7: 48 bits of time, the version, 12 bits, the variant, 62 bits.
    return UUID(int=first_id_at(instant).int | 7 << 76 | digest >> 68 << 64 | 2 << 62 | digest & (1 << 62) - 1)


#: What programs send for an id that they do not have. Names of people, such as `nan`, are none.
NO_IDS = frozenset({
    "undefined", "Undefined", "null", "Null", "NULL", "(null)", "<null>", "nil", "None", "NaN",
    "[object Object]", "[object Promise]",
})  # fmt: skip
#: Of texts that a program did not fill in. A GUID in braces is an id.
_PLACEHOLDER = re.compile(r"\{\{.*\}\}|\$\{.*\}|\{[A-Za-z_][\w.]*\}|%[sd]|<[A-Za-z_][\w. ]*>", re.DOTALL)
_EMOJI = "\u2190-\u2bff\U0001f000-\U0001faff"
#: Control and format characters, line separators, spaces that are no plain ones, fillers, and variation selectors.
#: Emoji are joined by U+200D and may have U+FE0F.
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200c\u200e\u200f"
    "\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164\ud800-\udfff\ufe00-\ufe0e\ufeff\uffa0\ufff0-\uffff"
    "\U000e0000-\U000e0fff]"
    f"|(?<![{_EMOJI}\ufe0f])\u200d|\u200d(?![{_EMOJI}])|(?<![{_EMOJI}])\ufe0f"
)


def find_user_id_problem(text: str) -> str:
    """Return why a text is no id of one customer, "" if it may be one. Cheap for plain ids: each frame asks."""
    if text.isascii() and text.isprintable() and text not in NO_IDS and text[:1] not in " {$%<" and text[-1:] != " ":
        return ""
    if text in NO_IDS or _PLACEHOLDER.fullmatch(text):
        return _("“%(text)s” is what programs send for a missing id", text=text[:40])
    if text != text.strip():
        return _("must not start or end with a space")
    if found := _INVISIBLE.search(text):
        return _("contains the invisible character %(character)s", character=f"U+{ord(found[0]):04X}")
    return ""


def reveal_odd_characters(text: str) -> str:
    """Return a stored id with its invisible characters and outer spaces as ⟨U+200B⟩."""
    inner = _INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)
    return re.sub(r"^ +| +$", lambda found: "⟨U+0020⟩" * len(found[0]), inner)
