"""The text of a configuration file ↔ plain values.

YAML as people expect it (the core of YAML 1.2): `no` and `22:00` are texts, not False and 1320. What could surprise is
refused: keys given twice, aliases (a few of them expand to gigabytes), tags, keys that are not texts, and characters
that the database cannot hold.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

MAX_SIZE = 1_048_576  #: bytes
_CORE = ("null", "bool", "int", "float", "str", "seq", "map")
_ODD_BREAKS = "\r\x85\u2028\u2029"
_RESOLVED = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?(?:0|[1-9][0-9]{0,17})$"), list("-+0123456789")),
    "float": (re.compile(r"^[-+]?[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?$"), list("-+0123456789")),
}


class InvalidDocument(ValueError):
    """The text is no configuration file."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    yaml_constructors = {
        tag: build
        for tag, build in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in _CORE
    }

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ConstructorError(None, None, "aliases (*name) are not supported", mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: ScalarNode | MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and ("\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value)):
            raise ConstructorError(None, None, "the database cannot hold this character", node.start_mark)
        return value

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConstructorError(None, None, "keys must be text; put it in quotes", key_node.start_mark)
            if key in seen:
                raise ConstructorError(None, None, f"“{key}” is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: MappingNode) -> None:
        """`<<` is a key like any other: there are no aliases to merge."""

    def construct_finite(self, node: ScalarNode) -> float:
        value = float(self.construct_scalar(node))
        if not math.isfinite(value):
            raise ConstructorError(None, None, "this number is too large", node.start_mark)
        return value


for _name, (_pattern, _first) in _RESOLVED.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_finite)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _represent_text(dumper: _Dumper, text: str) -> ScalarNode:
    # Several lines read best as a block. Line breaks that only YAML 1.1 knows survive nowhere but in double quotes.
    style = None
    if any(letter in text for letter in _ODD_BREAKS):
        style = '"'
    elif "\n" in text and not text[0].isspace():
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def load(raw: bytes) -> dict[str, Any]:
    """Raises `InvalidDocument` with the line where there is one."""
    if len(raw) > MAX_SIZE:
        raise InvalidDocument(f"the file must not be larger than {MAX_SIZE} bytes")
    try:
        document = yaml.load(raw.decode("utf-8-sig"), Loader=_Loader)  # noqa: S506  a safe loader, made stricter
    except UnicodeDecodeError:
        raise InvalidDocument("the file must be UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise InvalidDocument(f"{where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InvalidDocument(" ".join(str(error).split())) from None
    except RecursionError:
        raise InvalidDocument("the file is nested too deeply") from None
    except ValueError as error:  # an explicit tag on what does not fit it
        raise InvalidDocument(str(error)) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidDocument("the file must be a mapping of sections")
    return document


def dump(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=120)
