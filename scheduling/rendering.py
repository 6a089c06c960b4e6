"""Turning a template into what is said. Data that is missing fails the touch; nothing half-empty goes out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from scheduling.errors import InvalidInput
from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec
from scheduling.templating import CannotRender as CannotRender
from scheduling.templating import InvalidTemplate, Program, compile_text


def render(template: TemplateSpec, customer: CustomerSpec, event: EventSpec) -> tuple[str, str, str]:
    """Subject, body and locale for this customer. Raises `CannotRender` with what is missing."""
    text = text_for(template, customer.locale)
    names = names_for(customer, event)
    subject = _compiled(text.subject).render(dict(names)) if text.subject else ""
    return subject, _compiled(text.body).render(names), text.locale


def names_for(customer: CustomerSpec, event: EventSpec) -> dict[str, Any]:
    """What a text may name (`templating.VARIABLES`)."""
    return {
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


def check_text(source: str, *, field: str) -> None:
    """Raises `InvalidInput` naming `field` where a text is outside of the language or names an unknown variable."""
    try:
        compile_text(source)
    except InvalidTemplate as error:
        raise InvalidInput.of(field, str(error)) from None


@lru_cache(maxsize=1024)
def _outcome(source: str) -> Program | str:
    """A text that cannot be compiled is remembered as well: a batch of touches asks for it again and again."""
    try:
        return compile_text(source)
    except InvalidTemplate as error:
        return str(error)


def _compiled(source: str) -> Program:
    outcome = _outcome(source)
    if isinstance(outcome, str):
        raise CannotRender(outcome)
    return outcome
