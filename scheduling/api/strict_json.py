"""Parse JSON that PostgreSQL can store and all readers interpret alike; otherwise name the invalid place.

Python's parser accepts NaN, U+0000, lone surrogates, duplicate members and numbers of any length, which fail later.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput

DEPTH_LIMIT = 32
SMALLEST, LARGEST = -(2**63), 2**64 - 1  #: integers that other languages can hold
ERRORS_SHOWN = 100
PATH_SHOWN = 200

CONTAINERS = (dict, list)
UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
#: An escape that may stand for such a character. Unescaped, UTF-8 and JSON refuse them.
SUSPECT_ESCAPE = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")


class NotJson(Exception):
    """The body is not JSON."""


@dataclass(frozen=True, slots=True)
class _InvalidJsonValue:
    """Marks a place in the tree whose value is not JSON or cannot be stored."""

    message: str


class _JsonDocument:
    """One parse, and whether it found an invalid value."""

    def __init__(self) -> None:
        self.has_invalid_value = False

    def members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            self.has_invalid_value = True
            seen: set[str] = set()
            for name, _value in pairs:
                if name in seen:
                    found[name] = _InvalidJsonValue(_("is given twice"))
                seen.add(name)
        return found

    def integer(self, text: str) -> int | _InvalidJsonValue:
        if len(text) <= 20 and SMALLEST <= (value := int(text)) <= LARGEST:
            return value
        return self._mark_invalid("is a number beyond 64 bits; send it as a string")

    def real(self, text: str) -> float | _InvalidJsonValue:
        value = float(text)
        return value if math.isfinite(value) else self._mark_invalid("is a number too large; send it as a string")

    def constant(self, text: str) -> _InvalidJsonValue:
        return self._mark_invalid(f"{text} is not a JSON number")

    def _mark_invalid(self, message: str) -> _InvalidJsonValue:
        self.has_invalid_value = True
        return _InvalidJsonValue(message)


def decode_strict_json(body: bytes, *, array: str = "") -> Any:
    """Return the value of a JSON text. `array` names a document that is an array, in errors.

    Raises:
        NotJson: the text is not UTF-8 or not JSON.
        InvalidInput: values that cannot be stored, each with its place; at most `ERRORS_SHOWN`.
    """
    value, is_suspect = _decode(body)
    if is_suspect:
        _raise_invalid_values(_find_invalid_values(value, array if isinstance(value, list) else ""))
    return value


def decode_each(body: bytes, *, array: str) -> Any:
    """Return the value of a JSON text. In an array, errors stand in place of each entry that cannot be stored.

    Raises:
        NotJson: the text is not UTF-8 or not JSON.
    """
    value, is_suspect = _decode(body)
    if is_suspect and isinstance(value, list):
        for place, entry in enumerate(value):
            errors = list(islice(_find_invalid_values(entry, f"{array}.{place}", depth=1), ERRORS_SHOWN))
            if errors:
                value[place] = InvalidInput(*errors)
    return value


def _decode(body: bytes) -> tuple[Any, bool]:
    """Return the value, and whether something in it may not be storable."""
    document = _JsonDocument()
    decoder = json.JSONDecoder(
        object_pairs_hook=document.members,
        parse_int=document.integer,
        parse_float=document.real,
        parse_constant=document.constant,
    )
    try:
        value = decoder.decode(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise NotJson(f"The body is not UTF-8: byte {error.start} cannot be read.") from error
    except RecursionError as error:
        raise NotJson(f"The body is nested deeper than {DEPTH_LIMIT} levels.") from error
    except json.JSONDecodeError as error:
        raise NotJson(f"The body is not JSON: {error}.") from error
    return value, document.has_invalid_value or SUSPECT_ESCAPE.search(body) is not None or _is_too_deep(value)


def _is_too_deep(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _level in range(DEPTH_LIMIT + 1):
        children = chain.from_iterable(node.values() if isinstance(node, dict) else node for node in level)
        level = [child for child in children if isinstance(child, CONTAINERS)]
        if not level:
            return False
    return True


def _raise_invalid_values(found: Iterator[FieldError]) -> None:
    errors = list(islice(found, ERRORS_SHOWN))
    if errors:
        raise InvalidInput(*errors)


def _find_invalid_values(value: Any, path: str, *, depth: int = 0) -> Iterator[FieldError]:
    """Yield all invalid values in document order. Iterative, because the depth is what is checked."""
    waiting = [(value, path, depth)]
    while waiting:
        node, path, depth = waiting.pop()
        if isinstance(node, _InvalidJsonValue):
            yield FieldError(path, node.message)
        elif isinstance(node, str):
            if odd := find_unstorable_text(node):
                yield FieldError(path, odd)
        elif isinstance(node, dict | list):
            if depth >= DEPTH_LIMIT:
                yield FieldError(path, f"is nested deeper than {DEPTH_LIMIT} levels")
                continue
            if isinstance(node, dict):
                for name in node:
                    if odd := find_unstorable_text(name):
                        yield FieldError(_join_member_path(path, name), f"its name {odd}")
                waiting.extend(
                    (child, _join_member_path(path, name), depth + 1) for name, child in reversed(node.items())
                )
            else:
                waiting.extend((node[at], f"{path}.{at}", depth + 1) for at in range(len(node) - 1, -1, -1))


def find_unstorable_text(text: str) -> str:
    """Return why PostgreSQL refuses this text, or ""."""
    found = UNSTORABLE.search(text)
    if not found:
        return ""
    return _("contains %(character)s", character="U+0000") if found[0] == "\0" else "contains half a surrogate pair"


def _join_member_path(path: str, name: str) -> str:
    return (f"{path}.{name}" if path else name)[:PATH_SHOWN]
