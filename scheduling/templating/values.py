"""Define the values of message templates: errors, the state of a rendering, conversions, filters and their limits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import reduce
from typing import Any

from jinja2 import Environment
from jinja2.filters import do_title, do_truncate, do_urlencode

JINJA = Environment(autoescape=False)  # noqa: S701  only its lexer and parser run; messages are plain text
MAX_NAME = 200  #: characters
MAX_TEXT = 65_536  #: characters of a result, and of each text that a filter reads or returns
MAX_WORK = 100_000  #: units: a loop round costs its nodes, a filter at least one unit per 16 characters
MAX_NUMERAL = 20  #: characters of a number in a text
MAX_NUMBER = 10**18  #: operands and results of calculations
MAX_PRINTED = 10**100  #: numbers that are printed
NUMBER_FORMAT = re.compile(r"(?:[^%]|%%)*%[-+ 0#]{0,3}\d{0,3}(?:\.\d{1,2})?[dfFeEgGxX](?:[^%]|%%)*")


class CannotRender(Exception):
    """The data of this touch lacks a value, or has one that the text cannot use."""


class TooMuchWork(CannotRender):
    """The text exceeds a limit with this data."""


class Missing:
    """The value of a path without an item. Only `default` and `is defined` accept it."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path


class Run:
    """The state of one rendering."""

    __slots__ = ("left", "names", "pieces")

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.left = MAX_WORK
        self.pieces: list[str] = []

    def spend(self, work: int) -> None:
        """Use up `work` units. Raises `TooMuchWork` if fewer are left."""
        self.left -= work
        if self.left < 0:
            raise TooMuchWork("its loops and filters take too much work with this data")


def to_text(value: Any, path: str) -> str:
    """Return a value as text.

    Raises:
        CannotRender: for missing values, null, lists, objects, NaN and huge numbers.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.isoformat()  # RFC 3339
    if isinstance(value, str) or (isinstance(value, int | float) and abs(value) < MAX_PRINTED):
        return str(value)
    check_present_value(value, path)
    if isinstance(value, list | tuple):
        raise CannotRender(f"“{path}” is a list; name one of its entries, or use join")
    if isinstance(value, dict):
        raise CannotRender(f"“{path}” is an object; name one of its fields")
    raise CannotRender(f"“{path}” cannot be printed")


def read_as_text(run: Run, value: Any, unit: int = 16) -> str:
    """Return the text of a value and spend one unit of work per `unit` characters."""
    text = value if type(value) is str else to_text(value, "…")
    check_text_length(len(text))
    run.spend(1 + len(text) // unit)
    return text


def check_text_length(length: int) -> None:
    if length > MAX_TEXT:
        raise TooMuchWork(f"a text must not come to more than {MAX_TEXT} characters")


def check_found_value(value: Any) -> Any:
    if isinstance(value, Missing):
        raise CannotRender(f"“{value.path}” is missing")
    return value


def check_present_value(value: Any, path: str) -> Any:
    if value is None:
        raise CannotRender(f"“{path}” is null")
    return check_found_value(value)


def check_number(value: Any) -> Any:
    """Return a number. Raises `CannotRender` for other types, NaN and numbers above `MAX_NUMBER`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CannotRender("only numbers can be calculated with")
    if not abs(value) <= MAX_NUMBER:
        raise CannotRender("a number is too large")
    return value


def check_list_value(value: Any, path: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(check_present_value(value, path), list | tuple):
        raise CannotRender(f"“{path}” is not a list")
    return value  # type: ignore[no-any-return]


def check_single_value(run: Run, value: Any) -> Any:
    """Refuse values whose comparison has no bounded cost."""
    if isinstance(value, dict | list | tuple):
        raise CannotRender("lists and objects cannot be compared; ask for their length or a field")
    if isinstance(value, str):
        run.spend(len(value) // 64)
    return value


def contains_value(run: Run, whole: Any, value: Any) -> bool:
    value = check_single_value(run, value)
    if isinstance(whole, str):
        if not isinstance(value, str):
            raise CannotRender("“in” looks for a text in a text")
        run.spend(1 + len(whole) // 8)
        return value in whole
    whole = check_list_value(whole, "…")
    run.spend(len(whole) * (1 + (len(value) // 64 if isinstance(value, str) else 0)))
    return any(value == each for each in whole if not isinstance(each, dict | list | tuple))


def apply_default(run: Run, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    """Replace null too, because it has no text."""
    return default_value if isinstance(value, Missing) or value is None or (boolean and not value) else value


def _on_text(function: Callable[[str], str], unit: int = 16) -> Callable[[Run, Any], str]:
    """Make a filter of a function. It spends one unit of work per `unit` characters."""
    return lambda run, value: function(read_as_text(run, value, unit))


def _truncate(run: Run, value: Any, length: int = 255, killwords: bool = False, end: str = "...") -> str:
    """Truncate a text. Only the kept part counts, so the text may be longer than `MAX_TEXT`."""
    end = read_as_text(run, end)
    if type(length) is not int or not len(end) <= length <= MAX_TEXT:
        raise CannotRender("“truncate” takes a length above that of its end")
    return do_truncate(JINJA, to_text(value, "…"), length, killwords, end, leeway=5)


def _replace_text(run: Run, value: Any, old: Any, new: Any) -> str:
    text, old, new = read_as_text(run, value), read_as_text(run, old), read_as_text(run, new)
    check_text_length(len(text) + text.count(old) * (len(new) - len(old)))
    return text.replace(old, new)


def _join(run: Run, value: Any, d: Any = "", attribute: Any = "") -> str:
    entries, between = check_list_value(value, "…"), to_text(d, "…")
    steps = [
        int(part) if part.isdecimal() else part for part in read_as_text(run, attribute)[:MAX_NAME].split(".") if part
    ]
    run.spend(len(entries) * (1 + len(steps)))
    try:
        texts = [to_text(reduce(operator.getitem, steps, each), "…|join") for each in entries]
    except (LookupError, TypeError):
        raise CannotRender(f"“….{attribute}” is missing") from None
    check_text_length(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def _round(run: Run, value: Any, precision: int = 0) -> Any:
    if type(precision) is not int or abs(precision) > MAX_NUMERAL:
        raise CannotRender(f"“round” takes at most {MAX_NUMERAL} digits")
    return round(check_number(value), precision)


def _int(run: Run, value: Any) -> int:
    text = read_as_text(run, value)
    return int(text) if text.isdecimal() else int(float(text))


FILTERS: Mapping[str, Callable[..., Any]] = {
    "capitalize": _on_text(str.capitalize),
    "default": apply_default,
    "float": lambda run, value: float(read_as_text(run, value)),
    "int": _int,
    "join": _join,
    "length": lambda run, value: len(value),
    "lower": _on_text(str.lower),
    "replace": _replace_text,
    "round": _round,
    "title": _on_text(do_title, unit=1),
    "trim": _on_text(str.strip),
    "truncate": _truncate,
    "upper": _on_text(str.upper),
    "urlencode": _on_text(do_urlencode, unit=1),
}
