"""Turning a template into what is said. Data that is missing fails the touch; nothing half-empty goes out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import do_format
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduling.errors import InvalidInput
from scheduling.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec

#: What a text may name. `event.data` is whatever the event carried, so its inside is only known at send time.
KNOWN: Mapping[str, frozenset[str]] = {
    "user": frozenset({"id", "name", "level", "locale", "timezone"}),
    "event": frozenset({"id", "source", "type", "time", "data"}),
    "chat": frozenset({"id"}),
}

LONGEST = 10_000  #: letters that a `*` may make of a text
WIDE = re.compile(r"\d{4}|\*|\{[^}]*\{")  #: in a format: a column wider than any message
TOO_WIDE = "a format must not be wider than 999 characters"
#: Methods and filters that make a text of any length from a small number; `|format` says how a price looks.
UNBOUNDED = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
UNBOUNDED_FILTERS = ("batch", "center", "indent", "slice")


class _Sandbox(ImmutableSandboxedEnvironment):
    """No powers, no endless repetition, no columns of a million spaces: such a text would hang the page that saves it,
    as the compiler computes ahead, and a worker that renders it while it holds its customers' locks."""

    intercepted_binops = frozenset({"**", "*", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("“**” is not allowed")
        if operator == "%" and isinstance(left, str):
            return _formatted(left, right)
        for one, times in ((left, right), (right, left)) if operator == "*" else ():
            if isinstance(one, str | list | tuple) and isinstance(times, int) and len(one) * times > LONGEST:
                raise SecurityError(f"“*” must not make more than {LONGEST} of anything")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and WIDE.search(value.__self__):
            raise SecurityError(TOO_WIDE)
        return wrapped

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in UNBOUNDED and super().is_safe_attribute(obj, attr, value)


def _formatted(text: str, *values: Any, **named: Any) -> str:
    """The `format` filter, and `%` between a text and its values."""
    if WIDE.search(text):
        raise SecurityError(TOO_WIDE)
    return str(do_format(text, *values, **named))


_environment = _Sandbox(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=False)
_environment.globals.clear()
_environment.filters["format"] = _formatted
for _name in UNBOUNDED_FILTERS:
    del _environment.filters[_name]


class CannotRender(Exception):
    """The text asks for something that this touch does not have."""


def render(template: TemplateSpec, customer: CustomerSpec, event: EventSpec) -> tuple[str, str, str]:
    """Subject, body and locale for this customer. Raises `CannotRender` with what is missing."""
    text = text_for(template, customer.locale)
    context = {
        "user": {
            "id": customer.user_id,
            "name": customer.name or customer.user_id,
            "level": customer.level,
            "locale": customer.locale,
            "timezone": customer.timezone,
        },
        "event": {
            "id": event.event_id,
            "source": event.source,
            "type": event.type,
            "time": event.occurred_at,
            "data": event.data,
        },
        "chat": {"id": event.chat_id},
    }
    try:
        subject = _compiled(text.subject).render(context) if text.subject else ""
        return subject, _compiled(text.body).render(context), text.locale
    except UndefinedError as error:
        raise CannotRender(str(error)) from None
    except (TemplateError, ArithmeticError, TypeError, ValueError, LookupError) as error:
        raise CannotRender(f"{type(error).__name__}: {error}") from None


def text_for(template: TemplateSpec, locale: str) -> TextSpec:
    """The text in the customer's language, else in the same language of another region, else the first."""
    if not template.texts:
        raise CannotRender(f"template {template.key} has no text")
    wanted = locale.lower()
    for text in template.texts:
        if text.locale.lower() == wanted:
            return text
    for text in template.texts:
        if wanted and text.locale.lower().split("-")[0] == wanted.split("-")[0]:
            return text
    return template.texts[0]


@lru_cache(maxsize=4096)
def _compiled(source: str) -> Template:
    template = _environment.from_string(source)
    template.globals = {}  # instead of a chain of two empty ones, which every text would walk
    return template


def check_text(source: str, *, field: str) -> None:
    """Raises `InvalidInput` naming `field` where a text cannot be parsed or names what no touch will ever have."""
    try:
        tree = _environment.parse(source)
        _environment.from_string(source)
    except TemplateSyntaxError as error:
        raise InvalidInput.of(field, f"line {error.lineno}: {error.message}") from None
    except TemplateError as error:
        raise InvalidInput.of(field, str(error)) from None
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")}
    if tree.find(nodes.For):
        assigned.add("loop")
    inner = set()
    for attribute in tree.find_all((nodes.Getattr, nodes.Getitem)):
        assert isinstance(attribute, nodes.Getattr | nodes.Getitem)
        if isinstance(attribute.node, nodes.Name):
            inner.add(id(attribute.node))
            _check_path(attribute.node.name, _attribute(attribute), assigned, field)
    for name in tree.find_all(nodes.Name):
        if name.ctx == "load" and id(name) not in inner:
            _check_path(name.name, None, assigned, field)
    _check_filters(tree, field)


def _attribute(node: nodes.Getattr | nodes.Getitem) -> str | None:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None


def _check_path(root: str, attribute: str | None, assigned: set[str], field: str) -> None:
    if root in assigned:
        return
    if root not in KNOWN:
        raise InvalidInput.of(field, f"unknown variable “{root}”; there are {', '.join(sorted(KNOWN))}")
    if attribute is not None and attribute not in KNOWN[root]:
        raise InvalidInput.of(
            field, f"unknown variable “{root}.{attribute}”; {root} has {', '.join(sorted(KNOWN[root]))}"
        )


def _check_filters(tree: nodes.Template, field: str) -> None:
    for each in tree.find_all((nodes.Filter, nodes.Test)):
        known: Mapping[str, Any] = _environment.filters if isinstance(each, nodes.Filter) else _environment.tests
        if each.name not in known:
            raise InvalidInput.of(field, f"unknown filter or test “{each.name}”")
