"""Parse YAML and JSON, strictly and at a bounded cost, to values that PostgreSQL stores and all readers take alike.

Refused are keys given twice, numbers that other languages cannot hold, NUL, lone surrogates, and deep nesting. An error
names the place. Python's own parser accepts all of them, and orjson and pydantic take the last of two equal keys.

YAML is the core of version 1.2: `no` and `22:00` are texts, and so are integers of more than 18 digits, which are ids.
Keys that are not texts, aliases, merge keys and tags are refused as well. libyaml parses, and values are built from its
events one by one, so that a deep or large text is refused before it fills the stack or the memory.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from scheduling.error_text import ErrorText as _
from scheduling.errors import FieldError, InvalidInput

MAX_SIZE = 1_048_576  #: bytes
MAX_NODES = 100_000  #: keys and values of a YAML document
MAX_DEPTH = 32
YAML_DEPTH = MAX_DEPTH + 8  #: a configuration file wraps the values of forms in lists and mappings
FIELD_SIZE = 65_536  #: characters of a form field
SMALLEST, LARGEST = -(2**63), 2**64 - 1  #: integers that other languages can hold
ERRORS_SHOWN = 100  #: of a request: more would make the response as large as it
PATH_SHOWN = 200  #: characters

_NULL = re.compile(r"(?:~|null|Null|NULL|)")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
#: An escape of JSON that may stand for such a character. Unescaped, UTF-8 and JSON refuse them.
_SUSPECT_ESCAPE = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
TOO_LARGE = _("this number is too large; write it as text")
TOO_DEEP = _("it is nested deeper than %(most)s levels", most=MAX_DEPTH)
_CONTAINERS = frozenset({dict, list})
_ODD_BREAKS = "\r\x85\u2028\u2029"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  #: PyYAML can be built without libyaml


class InvalidText(ValueError):
    """The text is not valid. The message names the place."""


def is_same_json(one: Any, other: Any) -> bool:
    """Compare JSON values, or others of a column. Numbers are equal by value; for Python `True == 1` as well."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same_json(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def read_yaml(text: str, *, most: int = MAX_SIZE) -> Any:
    """Parse one YAML document of at most `most` bytes of UTF-8. Raises `InvalidText`."""
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        line, what = _line_number(text[: error.start]), find_unstorable_text(text[error.start])
        raise InvalidText(_("line %(line)s: %(what)s", line=line, what=what)) from None
    if len(raw) > most:
        raise InvalidText(_("must not be larger than %(most)s bytes", most=most))
    try:
        return _YamlReader(yaml.parse(text, Loader=_Loader)).read_document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _invalid_text(mark, str(error.problem or error.context)) from None
    except yaml.reader.ReaderError as error:
        before = raw[: error.position].decode("utf-8", "replace")
        raise InvalidText(_("line %(line)s: %(what)s", line=_line_number(before), what=error.reason)) from None


def _line_number(before: str) -> int:
    return before.count("\n") + 1


def _invalid_text(mark: Any, message: str) -> InvalidText:
    return InvalidText(_("line %(line)s: %(what)s", line=mark.line + 1, what=message) if mark else message)


class _YamlReader:
    """Build one document from parse events. The recursion ends at `YAML_DEPTH`."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._nodes = 0

    def read_document(self) -> Any:
        value, documents = None, 0
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _invalid_text(event.start_mark, _("but found another document"))
            elif isinstance(event, NodeEvent):
                value = self._read_value(event, 0)
        return value

    def _read_value(self, event: Any, depth: int) -> Any:
        self._check_node(event)
        if isinstance(event, ScalarEvent):
            return _scalar(event)
        if depth == YAML_DEPTH:
            raise _invalid_text(event.start_mark, _("it is nested deeper than %(most)s levels", most=YAML_DEPTH))
        if isinstance(event, SequenceStartEvent):
            items = []
            while not isinstance(event := next(self._events), SequenceEndEvent):
                items.append(self._read_value(event, depth + 1))
            return items
        members: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            self._check_node(event)
            if isinstance(event, ScalarEvent) and event.implicit[0] and event.value == "<<":
                raise _invalid_text(event.start_mark, _("merge keys (<<) are not supported"))
            key = _scalar(event) if isinstance(event, ScalarEvent) else None
            if not isinstance(key, str):
                raise _invalid_text(event.start_mark, _("keys must be text; put it in quotes"))
            if key in members:
                raise _invalid_text(event.start_mark, _("“%(name)s” is given twice", name=key))
            members[key] = self._read_value(next(self._events), depth + 1)
        return members

    def _check_node(self, event: Any) -> None:
        if isinstance(event, AliasEvent):
            raise _invalid_text(event.start_mark, _("aliases (*name) are not supported"))
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _invalid_text(
                event.start_mark, _("there must not be more than %(most)s keys and values", most=MAX_NODES)
            )
        if event.tag is not None and event.tag != "!":
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise _invalid_text(event.start_mark, _("tags (%(tag)s) are not supported", tag=tag))


def _scalar(event: Any) -> Any:
    text: str = event.value
    if event.implicit[0]:  # neither quoted nor a block
        if _NULL.fullmatch(text):
            return None
        if _BOOL.fullmatch(text):
            return text.lower() == "true"
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if not math.isfinite(number):
                raise _invalid_text(event.start_mark, TOO_LARGE)
            return number
    if problem := find_unstorable_text(text):
        raise _invalid_text(event.start_mark, problem)
    return text


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # A block suits several lines. Line breaks that only YAML 1.1 knows survive only in double quotes.
    style = None
    if any(letter in text for letter in _ODD_BREAKS):
        style = '"'
    elif "\n" in text and not text[0].isspace():
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def write_yaml(value: Any, *, sort_keys: bool = False) -> str:
    """Return YAML that `read_yaml` reads as the same value, except for integers of more than 18 digits."""
    return yaml.dump(value, Dumper=_Dumper, allow_unicode=True, sort_keys=sort_keys, width=120)


def read_json(text: str, *, most: int = FIELD_SIZE) -> Any:
    """Parse JSON that a person wrote, of at most `most` characters.

    Raises:
        InvalidText: with the line or the place in the value.
    """
    if len(text) > most:
        raise InvalidText(_("must not be larger than %(most)s characters", most=most))
    try:
        return decode_json(text.encode("utf-8", "surrogatepass"))
    except InvalidInput as error:
        first = error.errors[0]
        raise InvalidText(str(first) if first.field else first.message) from None


def decode_json(body: bytes, *, array: str = "", errors_in_place: bool = False) -> Any:
    """Return the value of a JSON text. `array` names, in errors, a document that is an array; else it is a member.

    With `errors_in_place` an `InvalidInput` stands in place of each entry of that array that cannot be stored.

    Raises:
        InvalidText: the text is not UTF-8 or not JSON.
        InvalidInput: values that cannot be stored, each with its place; at most `ERRORS_SHOWN`.
    """
    value, is_suspect = _decode(body)
    if not is_suspect:
        return value
    entries, depth = (value.get(array), 2) if isinstance(value, dict) else (value, 1)
    if errors_in_place and isinstance(entries, list):
        for place, entry in enumerate(entries):
            if errors := list(islice(_find_invalid_values(entry, f"{array}.{place}", depth=depth), ERRORS_SHOWN)):
                entries[place] = InvalidInput(*errors)
    if errors := list(islice(_find_invalid_values(value, array if isinstance(value, list) else ""), ERRORS_SHOWN)):
        raise InvalidInput(*errors)
    return value


@dataclass(frozen=True, slots=True)
class _InvalidJsonValue:
    """Marks a place in the tree whose value is no JSON or cannot be stored."""

    message: str


class _JsonDocument:
    """One parse, and whether it found an invalid value."""

    def __init__(self) -> None:
        self.has_invalid_value = False

    def members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(name for name, _value in pairs)
            found.update((name, self._mark_invalid(_("is given twice"))) for name, count in counts.items() if count > 1)
        return found

    def integer(self, text: str) -> int | _InvalidJsonValue:
        if len(text) <= 20 and SMALLEST <= (value := int(text)) <= LARGEST:
            return value
        return self._mark_invalid(TOO_LARGE)

    def real(self, text: str) -> float | _InvalidJsonValue:
        value = float(text)
        return value if math.isfinite(value) else self._mark_invalid(TOO_LARGE)

    def constant(self, text: str) -> _InvalidJsonValue:
        return self._mark_invalid(_("%(name)s is no number of JSON", name=text))

    def _mark_invalid(self, message: str) -> _InvalidJsonValue:
        self.has_invalid_value = True
        return _InvalidJsonValue(message)


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
        raise InvalidText(_("byte %(place)s is not UTF-8", place=error.start)) from None
    except RecursionError:
        raise InvalidText(TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise InvalidText(_("line %(line)s: %(what)s", line=error.lineno, what=error.msg)) from None
    is_suspect = document.has_invalid_value or _SUSPECT_ESCAPE.search(body) is not None
    return value, is_suspect or (body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_too_deep(value))


def _is_too_deep(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _level in range(MAX_DEPTH + 1):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return False
    return True


def check_storable(values: Mapping[str, Any]) -> None:
    """Check the values of a row, by column, that a person typed: JSON columns take any text.

    Raises:
        InvalidInput: each error with its place.
    """
    if errors := list(islice(_find_invalid_values(values, "", depth=-1), ERRORS_SHOWN)):
        raise InvalidInput(*errors)


def _find_invalid_values(value: Any, path: str, *, depth: int = 0) -> Iterator[FieldError]:
    """Yield all invalid values in document order. Iterative, because the depth is what is checked."""
    waiting = [(value, path, depth)]
    while waiting:
        node, path, depth = waiting.pop()
        if isinstance(node, _InvalidJsonValue):
            yield FieldError(path, node.message)
        elif isinstance(node, str):
            if problem := find_unstorable_text(node):
                yield FieldError(path, problem)
        elif isinstance(node, (dict, list)):
            if depth >= MAX_DEPTH:
                yield FieldError(path, TOO_DEEP)
                continue
            if isinstance(node, dict):
                for name in node:
                    if problem := find_unstorable_text(name):
                        yield FieldError(_join_path(path, name), _("its name %(what)s", what=problem))
            members = list(node.items() if isinstance(node, dict) else enumerate(node))
            waiting.extend((child, _join_path(path, name), depth + 1) for name, child in reversed(members))


def _join_path(path: str, name: str | int) -> str:
    return (f"{path}.{name}" if path else str(name))[:PATH_SHOWN]


def find_unstorable_text(text: str) -> str:
    """Return why PostgreSQL refuses this text, or ""."""
    found = _UNSTORABLE.search(text)
    return _("contains %(character)s", character=f"U+{ord(found[0]):04X}") if found else ""


def storable_text(text: str) -> str:
    """Replace NUL and lone surrogates, which PostgreSQL refuses."""
    return text if text.isprintable() else text.replace("\0", "\ufffd").encode(errors="replace").decode()
