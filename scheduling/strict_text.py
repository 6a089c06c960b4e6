"""Parse YAML and JSON that people write, strictly and at a bounded cost.

YAML is the core of version 1.2: `no` and `22:00` are texts. Keys given twice, keys that are not texts, aliases, merge
keys and tags are refused. So are characters that the database cannot store. libyaml parses, and values are built from
its events one by one. Depth and size of a text therefore reach neither Python's stack nor its memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from scheduling.error_text import ErrorText as _

MAX_SIZE = 1_048_576  #: bytes
MAX_NODES = 100_000  #: keys and values
MAX_DEPTH = 50
FIELD_SIZE = 65_536  #: characters of a form field

_NULL = re.compile(r"(?:~|null|Null|NULL|)")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?")
_UNSTORABLE_CHARACTER = re.compile("[\0\ud800-\udfff]")
UNSTORABLE = _("the database cannot hold this character")
_ODD_BREAKS = "\r\x85\u2028\u2029"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  #: PyYAML can be built without libyaml


class InvalidText(ValueError):
    """The text is not valid. The message names the line."""


def is_same_json(one: Any, other: Any) -> bool:
    """Compare JSON values. Numbers are equal by value; for Python `True == 1` as well."""
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
        raise InvalidText(
            _("line %(line)s: %(what)s", line=_line_number(text[: error.start]), what=UNSTORABLE)
        ) from None
    if len(raw) > most:
        raise InvalidText(_("must not be larger than %(most)s bytes", most=most))
    try:
        return _Builder().build(yaml.parse(text, Loader=_Loader))
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


class _Builder:
    """Build one document from parse events, without recursion."""

    def __init__(self) -> None:
        self._root: list[Any] = []
        self._open: list[Any] = [self._root]  #: the containers around the next value, innermost last
        self._keys: list[str | None] = [None]  #: for each container the key whose value comes next
        self._nodes = 0

    def build(self, events: Iterator[Any]) -> Any:
        documents = 0
        for event in events:
            match event:
                case DocumentStartEvent():
                    documents += 1
                    if documents > 1:
                        raise _invalid_text(event.start_mark, _("but found another document"))
                case MappingEndEvent() | SequenceEndEvent():
                    self._open.pop()
                    self._keys.pop()
                case AliasEvent():
                    raise _invalid_text(event.start_mark, _("aliases (*name) are not supported"))
                case ScalarEvent() | MappingStartEvent() | SequenceStartEvent():
                    self._node(event)
        return self._root[0] if self._root else None

    def _node(self, event: Any) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _invalid_text(
                event.start_mark, _("there must not be more than %(most)s keys and values", most=MAX_NODES)
            )
        if event.tag is not None and event.tag != "!":
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise _invalid_text(event.start_mark, _("tags (%(tag)s) are not supported", tag=tag))
        if isinstance(self._open[-1], dict) and self._keys[-1] is None:
            self._keys[-1] = self._key(event)
        elif isinstance(event, ScalarEvent):
            self._put(_scalar(event))
        else:
            value: Any = {} if isinstance(event, MappingStartEvent) else []
            self._put(value)
            self._open.append(value)
            self._keys.append(None)
            if len(self._open) > MAX_DEPTH:
                raise _invalid_text(event.start_mark, _("it is nested too deeply"))

    def _put(self, value: Any) -> None:
        if isinstance(self._open[-1], dict):
            self._open[-1][self._keys[-1]] = value
            self._keys[-1] = None
        else:
            self._open[-1].append(value)

    def _key(self, event: Any) -> str:
        if isinstance(event, ScalarEvent) and event.implicit[0] and event.value == "<<":
            raise _invalid_text(event.start_mark, _("merge keys (<<) are not supported"))
        key = _scalar(event) if isinstance(event, ScalarEvent) else None
        if not isinstance(key, str):
            raise _invalid_text(event.start_mark, _("keys must be text; put it in quotes"))
        if key in self._open[-1]:
            raise _invalid_text(event.start_mark, _("“%(name)s” is given twice", name=key))
        return key


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
                raise _invalid_text(event.start_mark, _("this number is too large"))
            return number
    if _UNSTORABLE_CHARACTER.search(text):
        raise _invalid_text(event.start_mark, UNSTORABLE)
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
    """Return YAML that `read_yaml` reads as the same value."""
    return yaml.dump(value, Dumper=_Dumper, allow_unicode=True, sort_keys=sort_keys, width=120)


def read_json(text: str, *, most: int = FIELD_SIZE) -> Any:
    """Parse JSON of at most `most` characters, with the rules of `read_yaml` for keys, depth and characters.

    Raises:
        InvalidText: with the line, if it is known.
    """
    if len(text) > most:
        raise InvalidText(_("must not be larger than %(most)s characters", most=most))
    try:
        value = json.loads(
            text, object_pairs_hook=_unique_object, parse_constant=_reject_constant, parse_float=_parse_finite
        )
    except RecursionError:
        raise InvalidText(_("it is nested too deeply")) from None
    except json.JSONDecodeError as error:
        raise InvalidText(_("line %(line)s: %(what)s", line=error.lineno, what=error.msg)) from None
    except InvalidText:
        raise
    except ValueError:  # digits beyond `sys.get_int_max_str_digits`
        raise InvalidText(_("this number is too large")) from None
    _check_values(value)
    return value


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidText(_("“%(name)s” is given twice", name=key))
        found[key] = value
    return found


def _reject_constant(name: str) -> Any:
    raise InvalidText(_("%(name)s is no number of JSON", name=name))


def _parse_finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise InvalidText(_("this number is too large"))
    return number


def _check_values(value: Any) -> None:
    """Check the depth level by level, and characters that the database cannot store."""
    level = [value]
    for _level in range(MAX_DEPTH):
        if any(isinstance(each, str) and _UNSTORABLE_CHARACTER.search(each) for each in level):
            raise InvalidText(UNSTORABLE)
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += (*each, *each.values())
            elif isinstance(each, list):
                inner += each
        level = inner
        if not level:
            return
    raise InvalidText(_("it is nested too deeply"))
