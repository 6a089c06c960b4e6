"""Where texts are computed: without powers, and without making a text of any length from a small one.

A text would hang the page that saves it, as the compiler computes ahead, and a worker that renders it while it holds
its customers' locks. What is plain is computed here at no further cost; for the rest see `scheduling.thrift`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from jinja2 import StrictUndefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import do_format, do_round, do_sum, do_tojson
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 10_000  #: letters that a `*` may make of a text
WIDE = re.compile(r"\d{4}|\*|\{[^}]*\{")  #: in a format: a column wider than any message
TOO_WIDE = "a format must not be wider than 999 characters"
MOST_DIGITS = 20
DEEPEST_INDENT = 4
#: Methods and filters that make a text of any length from a small number; `|format` says how a price looks.
UNBOUNDED = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "translate", "zfill"})
UNBOUNDED_FILTERS = ("batch", "center", "indent", "slice")

#: What makes little more than it is given, so that a text's own length bounds it.
PLAIN_FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "first", "float", "int", "last", "length", "lower", "round", "title",
    "trim", "upper",
})  # fmt: skip
PLAIN_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.If,
    nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.Test, nodes.Not, nodes.And, nodes.Or, nodes.Neg, nodes.Pos,
    nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Concat, nodes.Slice, nodes.Keyword,
)  # fmt: skip


class Sandbox(ImmutableSandboxedEnvironment):
    """No powers, no endless repetition, no columns of a million spaces."""

    intercepted_binops = frozenset({"**", "*", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=False)
        self.globals.clear()
        self.filters |= {"format": formatted, "round": _round, "sum": _sum, "tojson": _tojson}
        for name in UNBOUNDED_FILTERS:
            del self.filters[name]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("“**” is not allowed")
        if operator == "%" and isinstance(left, str):
            return self.filters["format"](left, right)
        for one, times in ((left, right), (right, left)) if operator == "*" else ():
            if isinstance(one, str | bytes | list | tuple) and isinstance(times, int) and len(one) * times > LONGEST:
                raise SecurityError(f"“*” must not make more than {LONGEST} of anything")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and WIDE.search(value.__self__):
            raise SecurityError(TOO_WIDE)
        return wrapped

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in UNBOUNDED and super().is_safe_attribute(obj, attr, value)


def formatted(text: str, *values: Any, **named: Any) -> str:
    """The `format` filter, and `%` between a text and its values."""
    if WIDE.search(text):
        raise SecurityError(TOO_WIDE)
    return str(do_format(text, *values, **named))


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > MOST_DIGITS:
        raise SecurityError(f"“round” must not be asked for more than {MOST_DIGITS} digits")
    return do_round(value, precision, method)


@wraps(do_sum)
def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("“sum” adds numbers up")
    return do_sum(environment, iterable, attribute, start)


@wraps(do_tojson)
def _tojson(eval_ctx: Any, value: Any, indent: int | None = None) -> Any:
    if indent is not None and indent > DEEPEST_INDENT:
        raise SecurityError(f"“tojson” must not indent by more than {DEEPEST_INDENT}")
    return do_tojson(eval_ctx, value, indent)


def is_plain(node: nodes.Node, *, formats: bool = False) -> bool:
    """Whether what it makes is bounded by its own length and by the data. `formats`: it is part of a format."""
    match node:
        case (
            nodes.Filter(name="format", node=nodes.Const(), kwargs=[], dyn_args=None, dyn_kwargs=None)
            | nodes.Mod(left=nodes.Const())
        ):
            known, formats = not formats, True
        case nodes.Filter():
            known = node.name in PLAIN_FILTERS
        case nodes.Call(
            node=nodes.Getattr(attr="strftime"), args=[nodes.Const()], kwargs=[], dyn_args=None, dyn_kwargs=None
        ):
            known = True
        case _:
            known = type(node) in PLAIN_NODES
    return known and all(is_plain(each, formats=formats) for each in node.iter_child_nodes())
