"""Render message templates. Missing data fails the touch, so that no incomplete text is sent."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from scheduling.errors import InvalidInput
from scheduling.policy.profile import NO_PROFILE, Profile
from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec
from scheduling.templating.compiler import InvalidTemplate, Program, compile_text
from scheduling.templating.values import CannotRender


def render_message(template: TemplateSpec, customer: CustomerSpec, event: EventSpec) -> tuple[str, str, str]:
    """Return subject, body and locale for this customer.

    Raises:
        CannotRender: data is missing or unusable, or the template has no valid text.
    """
    text = choose_text(template, customer.locale)
    names = template_variables(customer, event)
    subject = _get_program(text.subject).render(dict(names)) if text.subject else ""
    return subject, _get_program(text.body).render(names), text.locale


def template_variables(customer: CustomerSpec, event: EventSpec) -> dict[str, Any]:
    """Return the variables of a text (`templating.VARIABLES`)."""
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
        "customer": _NO_PROFILE_FIELDS if customer.profile is NO_PROFILE else _profile_fields(customer.profile),
    }


def _profile_fields(profile: Profile) -> dict[str, Any]:
    return {"attributes": profile.attributes, "tags": profile.tags}


_NO_PROFILE_FIELDS = _profile_fields(NO_PROFILE)


def choose_text(template: TemplateSpec, locale: str) -> TextSpec:
    """Return the text in the customer's locale, else in the same language, else the first one."""
    if not template.texts:
        raise CannotRender(f"template {template.key} has no text")
    if len(template.texts) == 1:
        return template.texts[0]
    wanted = locale.lower()
    for text in template.texts:
        if text.locale.lower() == wanted:
            return text
    for text in template.texts:
        if wanted and text.locale.lower().split("-")[0] == wanted.split("-")[0]:
            return text
    return template.texts[0]


def reads_profile(template: TemplateSpec) -> bool:
    """Return whether a text of the template names attributes or tags."""
    programs = [_compile_cached(source) for text in template.texts for source in (text.subject, text.body)]
    return any(isinstance(each, Program) and "customer" in each.roots for each in programs)


def check_text(source: str, *, field: str) -> None:
    """Raise `InvalidInput` for `field` if a text does not compile."""
    try:
        compile_text(source)
    except InvalidTemplate as error:
        raise InvalidInput.of(field, str(error)) from None


@lru_cache(maxsize=1024)
def _compile_cached(source: str) -> Program | str:
    """Compile a text and cache the program or the error: a batch compiles the same text repeatedly."""
    try:
        return compile_text(source)
    except InvalidTemplate as error:
        return str(error)


def _get_program(source: str) -> Program:
    outcome = _compile_cached(source)
    if isinstance(outcome, str):
        raise CannotRender(outcome)
    return outcome
