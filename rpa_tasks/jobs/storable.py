"""Whether PostgreSQL can keep a value as JSON: Python's parser lets pass what `jsonb` refuses."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

#: U+0000 as it is written in JSON, and not the six characters of its name behind a backslash of their own.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def as_stored(value: Any) -> Any:
    """The value as it is read back from `jsonb`, which writes numbers without an exponent: 1e300 has 301 digits."""
    return json.loads(json.dumps(value, ensure_ascii=False), parse_float=_plain)


def _plain(text: str) -> int | float:
    number = Decimal(text)
    return int(number) if "e" in text and number == number.to_integral_value() else float(text)


def unstorable(value: Any) -> str:
    """Why it cannot be kept, or ""."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:  # NaN, half a surrogate pair, no JSON at all
        return str(error)
    return "contains U+0000" if _NUL.search(text) else ""
