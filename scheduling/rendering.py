"""Turning a template into what is said. Data that is missing fails the touch; nothing half-empty goes out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import ChainableUndefined, Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes

from scheduling.errors import InvalidInput
from scheduling.sandbox import Sandbox, is_plain
from scheduling.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec
from scheduling.thrift import Thrifty, TooMuch

#: What a text may name. `event.data` is whatever the event carried, so its inside is only known at send time.
KNOWN: Mapping[str, frozenset[str]] = {
    "user": frozenset({"id", "name", "level", "locale", "timezone"}),
    "event": frozenset({"id", "source", "type", "time", "data"}),
    "chat": frozenset({"id"}),
}

_plain, _thrifty = Sandbox(), Thrifty()


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
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
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
    template = (_plain if is_plain(_plain.parse(source)) else _thrifty).from_string(source)
    template.globals = {}  # instead of a chain of two empty ones, which every text would walk
    return template


def check_text(source: str, *, field: str) -> None:
    """Raises `InvalidInput` naming `field` where a text cannot be parsed or names what no touch will ever have."""
    try:
        tree = _plain.parse(source)
        _try(_compiled(source))
    except TemplateSyntaxError as error:
        raise InvalidInput.of(field, f"line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise InvalidInput.of(field, "it is nested too deeply") from None
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


def _try(template: Template) -> None:
    """Raises `TooMuch` where it takes too much work whatever the event says."""
    if isinstance(template.environment, Thrifty):
        try:
            template.render({name: ChainableUndefined(name=name) for name in KNOWN})
        except TooMuch:
            raise
        except Exception:  # noqa: S110 (what is missing here will be there)
            pass


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
        known: Mapping[str, Any] = _plain.filters if isinstance(each, nodes.Filter) else _plain.tests
        if each.name not in known:
            raise InvalidInput.of(field, f"unknown filter or test “{each.name}”")
