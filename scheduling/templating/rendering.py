"""Render message templates. Missing data fails the touch, so that no incomplete text is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from django.conf import settings

from scheduling.error_text import ErrorText as _
from scheduling.errors import InvalidInput
from scheduling.policy.profile import NO_PROFILE, Profile
from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec
from scheduling.templating.engine import Text
from scheduling.templating.library import CannotRender, InvalidTemplate, Run

TRADITIONAL = frozenset(("tw", "hk", "mo"))  #: regions that write Chinese in traditional characters
LOCALE = re.compile(r"[A-Za-z]{2,8}(?:[-_][A-Za-z0-9]{1,8})*")  #: BCP 47, also with “_”
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def render_message(
    template: TemplateSpec, customer: CustomerSpec, event: EventSpec, escape: Callable[[str], str] = str
) -> tuple[str, str, str]:
    """Return subject, body and locale for this customer, with instants in the customer's zone.

    `escape` is that of the channel. Values in the subject are put on one line: a header or a title has no markup.

    Raises:
        CannotRender: data is missing or unusable, or the template has no valid text.
    """
    text = choose_text(template, customer.locale)
    names, language = template_variables(customer, event), _find_language(text.locale)
    subject = ""
    if text.subject:
        subject = _get_text(text.subject).render(Run(names, escape_line, customer.timezone, language))
    body = _get_text(text.body).render(Run(names, escape, customer.timezone, language))
    return subject, body, text.locale


def escape_line(value: str) -> str:
    """Return a value without line breaks and other control characters."""
    return _CONTROLS.sub(" ", value)


def template_variables(customer: CustomerSpec, event: EventSpec) -> dict[str, Any]:
    """Return the variables of a text (`engine.VARIABLES`)."""
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


class Locale(NamedTuple):
    """The parts of a locale, in lower case. Chinese always has a script."""

    language: str
    script: str
    region: str


@lru_cache(maxsize=1024)
def read_locale(tag: str) -> Locale:
    """Return the parts of a BCP 47 tag in any case, also with “_” and an encoding: `zh_TW.UTF-8`."""
    language, *rest = re.split(r"[.@]", tag.strip().lower())[0].replace("_", "-").split("-")
    script = next((part for part in rest if len(part) == 4 and part.isalpha()), "")
    region = next((part for part in rest if re.fullmatch("[a-z]{2}|[0-9]{3}", part)), "")
    if language == "zh" and not script:
        script = "hant" if region in TRADITIONAL else "hans"
    return Locale(language, script, region)


def choose_text(template: TemplateSpec, locale: str) -> TextSpec:
    """Return the text in the customer's language, else in the installation's, else the first one.

    Within a language the same script counts more than the same region, and that more than a text without region.
    """
    if not template.texts:
        raise CannotRender(_("template %(key)s has no text", key=template.key))
    if len(template.texts) == 1:
        return template.texts[0]
    for wanted in (read_locale(locale), read_locale(settings.LANGUAGE_CODE)):
        found = [(read_locale(text.locale), text) for text in template.texts]
        near = [
            (has.script == wanted.script, has.region == wanted.region, not has.region, text)
            for has, text in found
            if has.language == wanted.language
        ]
        if near:
            return max(near, key=lambda each: each[:3])[3]
    return template.texts[0]


@lru_cache(maxsize=1024)
def _find_language(locale: str) -> str:
    """Return the name of a locale's language in Django's catalogues; "" for a text without a valid one."""
    if not LOCALE.fullmatch(locale):
        return ""
    found = read_locale(locale)
    return f"zh-{found.script}" if found.language == "zh" else "-".join(filter(None, (found.language, found.region)))


def reads_profile(template: TemplateSpec) -> bool:
    """Return whether a text of the template names attributes or tags."""
    texts = [_compile_cached(source) for text in template.texts for source in (text.subject, text.body)]
    return any(isinstance(each, Text) and "customer" in each.roots for each in texts)


def check_text(source: str, *, field: str) -> None:
    """Raise `InvalidInput` for `field` if a text does not compile."""
    try:
        Text(source)
    except InvalidTemplate as error:
        raise InvalidInput.of(field, str(error)) from None


@lru_cache(maxsize=1024)
def _compile_cached(source: str) -> Text | str:
    """Compile a text and cache it or the error: a batch compiles the same text repeatedly."""
    try:
        return Text(source)
    except InvalidTemplate as error:
        return str(error)


def _get_text(source: str) -> Text:
    outcome = _compile_cached(source)
    if isinstance(outcome, str):
        raise CannotRender(outcome)
    return outcome
