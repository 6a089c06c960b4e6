"""The closed library of message texts: what a value prints as, the filters, `if`, and one level of `for`.

`docs/reference/templates.md` lists them with their limits. No tag and no filter of Django's own library is loaded.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal, InvalidOperation
from functools import wraps
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.conf import settings
from django.template import Library, TemplateSyntaxError, defaultfilters
from django.template.context import BaseContext
from django.template.defaulttags import IfNode, do_for, do_if
from django.utils import dateformat
from django.utils.formats import get_format
from django.utils.safestring import SafeString
from django.utils.translation import override

from scheduling.error_text import ErrorText as _

MAX_TEXT = 65_536  #: characters of a result, and of each text that a filter reads or returns
MAX_ITEMS = 50  #: entries of the list of a loop
MAX_WORK = 250_000  #: characters that filters and conditions read and values print; an expression counts as `READ`
READ = 10
DATE_WORK = 50  #: units for a character of a format
MAX_PRINTED = 10**100  #: numbers that are printed
MAX_EXPONENT = 100  #: of a number that is a text
MAX_DEPTH = 10  #: nested tags
MAX_OPERATORS = 40  #: of a condition, one in another
MISSING = object()  #: the value of a path without an item


class CannotRender(Exception):
    """The data of this touch lacks a value, or has one that the text cannot use."""


class InvalidTemplate(TemplateSyntaxError):
    """The text is not in the template language. The message names the line."""


class Run(BaseContext):
    """The names of one rendering, how it writes values, and the work that is left to it."""

    template: Any  #: read by Django's nodes when they fail
    path = ""  #: the expression that is resolved, for errors

    def __init__(
        self, names: Mapping[str, Any], escape: Callable[[str], str] = str, timezone: str = "", language: str = ""
    ) -> None:
        """Take the names, the escape of the channel's format, and the zone and language of instants and numbers."""
        super().__init__(names)
        self.escape = escape
        self.language = language or settings.LANGUAGE_CODE
        self.left = MAX_WORK
        self._timezone = timezone

    def spend(self, work: int) -> None:
        """Use up `work` units. Raises `CannotRender` if fewer are left."""
        self.left -= work
        if self.left < 0:
            raise CannotRender(_("its loops and filters take too much work with this data"))

    def read_text(self, value: Any) -> str:
        """Return the text of a value, not escaped, and spend its length.

        Raises:
            CannotRender: for missing values, null, lists, objects, NaN and huge numbers, or too long a text.
        """
        if isinstance(value, str):
            text = value
        elif isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, datetime):
            text = self.read_instant(value).isoformat()  # RFC 3339
        elif isinstance(value, int | float) and abs(value) < MAX_PRINTED:
            text = str(value)
        else:
            self.check_present(value)
            if isinstance(value, list | tuple):
                raise CannotRender(_("“%(name)s” is a list; name one of its entries, or use join", name=self.path))
            if isinstance(value, dict):
                raise CannotRender(_("“%(name)s” is an object; name one of its fields", name=self.path))
            raise CannotRender(_("“%(name)s” cannot be printed", name=self.path))
        self.spend(len(text))
        return check_length(text)

    def read_instant(self, value: Any) -> datetime:
        """Return an instant, or one that a text states as RFC 3339, in the customer's zone."""
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                raise CannotRender(_("“%(name)s” is not an instant", name=self.path)) from None
        if not isinstance(value, datetime):
            raise CannotRender(_("“%(name)s” is not an instant", name=self.path))
        try:
            zone = ZoneInfo(self._timezone or settings.TIME_ZONE)
        except (ZoneInfoNotFoundError, ValueError, OSError):  # a zone that this machine does not know
            zone = ZoneInfo(settings.TIME_ZONE)
        return value.astimezone(zone) if value.tzinfo else value.replace(tzinfo=zone)

    def check_present(self, value: Any) -> None:
        if value is MISSING:
            raise CannotRender(_("“%(name)s” is missing", name=self.path))
        if value is None:
            raise CannotRender(_("“%(name)s” is null", name=self.path))


def check_length(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise CannotRender(_("a text must not come to more than %(most)s characters", most=MAX_TEXT))
    return text


# --- filters ----------------------------------------------------------------------------------------------------------

register = Library()
#: What filters take. Django's print a wrong argument or nothing.
ARGUMENTS: Mapping[str, re.Pattern[str]] = {
    "date": re.compile(r"(?!\w*_FORMAT$).{1,100}"),
    "time": re.compile(r"(?:[aAefgGhHiOPsTuZ]|[^a-zA-Z\\]|\\.){1,100}"),
    "floatformat": re.compile(r"-?\d{1,2}[gu]{0,2}|[gu]{1,2}"),
    "join": re.compile(r".{0,100}"),
    "truncatechars": re.compile(r"[1-9]\d{0,4}"),
    "urlencode": re.compile(r".{0,100}"),
}


@register.filter
def default(value: Any, replacement: Any, *, run: Run) -> Any:
    """Replace a missing value and null. Unlike Django's filter, 0, false and an empty text stay."""
    return replacement if value is MISSING or value is None else value


def _format(value: Any, form: str, formatter: Any, run: Run) -> str:
    run.spend(DATE_WORK * len(form))
    return str(formatter(run.read_instant(value)).format(form))


@register.filter
def date(value: Any, form: Any = None, *, run: Run) -> str:
    with override(run.language):
        return _format(value, form or get_format("DATE_FORMAT"), dateformat.DateFormat, run)


@register.filter
def time(value: Any, form: Any = None, *, run: Run) -> str:
    with override(run.language):
        return _format(value, form or get_format("TIME_FORMAT"), dateformat.TimeFormat, run)


@register.filter
def floatformat(value: Any, form: Any = -1, *, run: Run) -> str:
    try:
        number = Decimal(run.read_text(value).strip())
    except InvalidOperation:
        raise CannotRender(_("“%(name)s” is not a number", name=run.path)) from None
    if isinstance(value, bool) or not number.is_finite() or abs(number.adjusted()) > MAX_EXPONENT:
        raise CannotRender(_("“%(name)s” is not a number", name=run.path))
    with override(run.language):
        return defaultfilters.floatformat(number, form)


@register.filter
def join(value: Any, between: Any, *, run: Run) -> SafeString:
    """Join the entries of a list. They are escaped here, so that markup of the author can stand between them."""
    if not isinstance(value, list | tuple):
        raise CannotRender(_("“%(name)s” is not a list", name=run.path))
    run.spend(READ * len(value))
    return SafeString(check_length(str(between).join(run.escape(run.read_text(each)) for each in value)))


@register.filter
def length(value: Any, *, run: Run) -> int:
    if not isinstance(value, str | list | tuple | dict):
        raise CannotRender(_("“%(name)s” has no length", name=run.path))
    return len(value)


def _read_text_first(function: Callable[..., str]) -> Callable[..., str]:
    """Make a filter of Django's that takes a text one of ours."""

    @wraps(function)
    def apply(value: Any, *arguments: Any, run: Run) -> str:
        with override(run.language):  # Django's catalogues have their own ellipses
            return function(run.read_text(value), *arguments)

    return apply


for _name in ("lower", "title", "truncatechars", "upper", "urlencode"):
    register.filter(_name, _read_text_first(getattr(defaultfilters, _name)))


# --- if and for -------------------------------------------------------------------------------------------------------


def _compare(run: Run, name: str, left: Any, right: Any) -> bool:
    """Compare values whose comparison has a bounded cost. Raises `TypeError` for others."""
    whole = str | list | tuple if name in ("in", "not in") else str | int | float | datetime
    if not isinstance(left, str | int | float | datetime) or not isinstance(right, whole):
        raise TypeError
    run.spend(sum(len(each) for each in (left, right) if isinstance(each, str)))
    run.spend(READ * len(right) if isinstance(right, list | tuple) else 0)
    return bool(_COMPARISONS[name](left, right))


_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "in": lambda value, whole: value in whole, "not in": lambda value, whole: value not in whole,
}  # fmt: skip


def _compile_condition(tree: Any, depth: int = 0) -> Callable[[Run], Any]:
    """Turn Django's tree of operators and expressions into a function.

    Django's own takes each error for false, so that a wrong branch is sent.
    """
    if depth > MAX_OPERATORS:
        raise InvalidTemplate(_("it is nested too deeply"))
    if tree.id == "literal":
        return tree.value.resolve  # type: ignore[no-any-return]
    first, name = _compile_condition(tree.first, depth + 1), getattr(tree.first, "text", "…")
    if tree.id == "not":
        return lambda run: not first(run)
    second = _compile_condition(tree.second, depth + 1)
    if tree.id == "and":
        return lambda run: first(run) and second(run)
    if tree.id == "or":
        return lambda run: first(run) or second(run)
    if tree.id not in _COMPARISONS:
        raise InvalidTemplate(_("“%(name)s” is not part of the template language", name=tree.id))

    def compare(run: Run) -> bool:
        try:
            return _compare(run, tree.id, first(run), second(run))
        except TypeError:
            raise CannotRender(_("“%(name)s” cannot be compared", name=name)) from None

    return compare


@register.tag("if")
def build_if(parser: Any, token: Any) -> IfNode:
    found: Any = do_if(parser, token).conditions_nodelists
    tests: Any = [(test and SimpleNamespace(eval=_compile_condition(test)), body) for test, body in found]
    return IfNode(tests)


@register.tag("for")
def build_for(parser: Any, token: Any) -> Any:
    words = token.split_contents()
    if parser.loop:
        raise InvalidTemplate(_("a loop must not contain another loop"))
    if len(words) != 4 or words[2] != "in" or not words[1].isidentifier():
        raise InvalidTemplate(_("a loop is written like {% for line in event.data.lines %}"))
    parser.loop = words[1]
    node: Any = do_for(parser, token)
    parser.loop = ""
    expression = node.sequence

    def find_items(run: Run, ignore_failures: bool = True) -> Any:
        items = expression.resolve(run)
        if not isinstance(items, list | tuple):
            raise CannotRender(_("“%(name)s” is not a list", name=expression.path))
        if len(items) > MAX_ITEMS:
            raise CannotRender(_("“%(name)s” has more than %(most)s entries", name=expression.path, most=MAX_ITEMS))
        return items

    node.sequence = SimpleNamespace(resolve=find_items)
    return node
