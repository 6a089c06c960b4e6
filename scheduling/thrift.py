"""Where texts that are not plain are computed: with loops, variables, `replace`, `join` …

There is an allowance for each text. Whatever makes letters, and each round of a loop, is paid for from it: before,
where it can grow by much, afterwards where by little. So a text that would never end is an error in a moment.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import do_urlize, do_wordwrap, make_attrgetter
from jinja2.runtime import Context, Macro

from scheduling.counted import JOINED, MADE, ROUND, SEARCHED, Counted
from scheduling.sandbox import Sandbox, formatted

WORK = 1_000_000  #: letters that a text may make on its way; a round of a loop costs what it contains
TOO_MUCH = f"its loops and what they make take too much work; all of it may come to {WORK} letters"
AT_ONCE = frozenset(
    {"attr", "d", "default", "first", "last", "random"}
)  #: what picks one that there is, unseen the rest
LETTERS_AT_ONCE = 16  #: that are looked through while one is made


class TooMuch(SecurityError):
    """The allowance is spent."""


class _Allowance(threading.local):
    left = 0


_allowance = _Allowance()


def spend(letters: int) -> None:
    _allowance.left -= letters
    if _allowance.left < 0:
        raise TooMuch(TOO_MUCH)


class Thrifty(Sandbox):
    """Where what is not plain is computed: everything is paid for."""

    intercepted_binops = Sandbox.intercepted_binops | {"+"}

    def __init__(self) -> None:
        super().__init__()
        self.template_class = _ThriftyTemplate
        self.filters |= {"format": _format, "join": _join, "replace": _replace}
        self.filters |= {"urlize": _multiplying(do_urlize), "wordwrap": _multiplying(do_wordwrap)}
        self.filters = {name: each if name in AT_ONCE else _paid(each) for name, each in self.filters.items()}
        self.filters |= {ROUND: _count_round, JOINED: _concatenate, MADE: _weighed, SEARCHED: _searched}

    def from_string(self, source: Any, *args: Any, **named: Any) -> Template:
        _allowance.left = WORK
        return super().from_string(source, *args, **named)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        made = []
        for piece in pieces:
            spend(len(piece))
            made.append(piece)
        return "".join(made)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return _weighed(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def pay_first(*values: Any, **named: Any) -> str:
            _pay_format(value.__self__, "{", values, named)
            return wrapped(*values, **named)

        return pay_first

    def call(self, context: Context, method: Any, *args: Any, **named: Any) -> Any:
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            args = _paid_arguments(method.__name__, owner, args)
        elif isinstance(owner, list | tuple):
            _searched(owner)
        elif isinstance(method, Macro):
            _weighed((args, named))
        made = super().call(context, method, *args, **named)
        spend(1 + _size(made))
        return made


class _ThriftyTemplate(Template):
    def render(self, *args: Any, **named: Any) -> str:
        _allowance.left = WORK
        return super().render(*args, **named)


@pass_context
def _count_round(context: Context, cost: int) -> bool:
    """With the context, or the compiler would count it once for all."""
    spend(cost)
    return True


# --- what is paid for -------------------------------------------------------------------------------------------------


def _size(value: Any) -> int:
    if isinstance(value, str | bytes | list | tuple | dict | set):
        return len(value)
    return value.bit_length() // 8 if isinstance(value, int) else 0


def _weighed(value: Any) -> Any:
    """With all that it contains, as often as it does: so long would be what is said of it."""
    spend(1 + _size(value))
    if isinstance(value, list | tuple | set):
        for each in value:
            _weighed(each)
    elif isinstance(value, dict):
        for each in value.values():
            _weighed(each)
    return value


def _paid(function: Callable[..., Any]) -> Callable[..., Any]:
    """Whatever a filter makes, afterwards: it can grow by little more than what it was given."""

    @wraps(function)
    def paid(*args: Any, **named: Any) -> Any:
        for each in args:
            _searched(each)
        made = function(*args, **named)
        return _each_paid(made) if isinstance(made, Iterator) else _weighed(made)

    return paid


def _each_paid(made: Iterator[Any]) -> Iterator[Any]:
    for each in made:
        spend(1)
        yield each


def _searched(value: Any) -> Any:
    """Gone through once, at the most."""
    if isinstance(value, list | tuple | dict | str | bytes):
        spend(len(value) if isinstance(value, list | tuple | dict) else len(value) // LETTERS_AT_ONCE)
    return value


def _paid_arguments(name: str, owner: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of a text's method; those of `join` are gone through once."""
    if name == "join" and args:
        args = (list(args[0]), *args[1:])
        spend(sum(_size(each) + len(owner) for each in args[0]))
    if name == "replace" and len(args) > 1:
        spend(owner.count(args[0]) * _size(args[1]))
    spend(len(owner))
    return args


def _pay_format(text: str, mark: str, values: Any, named: Any) -> None:
    width = 999 if re.search(r"\d{3}", text) else 99
    spend(len(text) + text.count(mark) * (width + len(str(values)) + len(str(named))))


def _format(text: str, *values: Any, **named: Any) -> str:
    _pay_format(text, "%", values, named)
    return formatted(text, *values, **named)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return _joined(str(d), value)


def _concatenate(pieces: list[Any]) -> str:
    return _joined("", pieces)


def _joined(between: str, pieces: Iterable[Any]) -> str:
    texts = []
    for each in pieces:
        texts.append(str(each))
        spend(len(texts[-1]) + len(between))
    return between.join(texts)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    spend(text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _multiplying(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that puts what it is given more than once into the text."""

    @wraps(function)
    def paid(environment: Any, text: Any, *args: Any, **named: Any) -> Any:
        spend(_size(text) * (1 + sum(map(_size, (*args, *named.values())))))
        return function(environment, text, *args, **named)

    return paid
