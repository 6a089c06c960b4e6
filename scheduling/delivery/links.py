"""Rewrite the links of a text to short signed redirects, by which a click is known.

A redirect names the delivery key and the number of the link. Its target is the link of that number in the stored text,
which keeps the original links: no redirect leads elsewhere. A retry makes the same redirects.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from functools import lru_cache
from uuid import UUID

from django.conf import settings
from django.core.signing import BadSignature
from django.utils.crypto import constant_time_compare, salted_hmac

from scheduling.channels.base import Channel, Message
from scheduling.policy.specs import TemplateSpec

SALT = "scheduling.links"
MOST_LINKS = 200  #: of one text; further ones stay as they are
SIGNATURE = 10  # bytes
TOKEN = re.compile(r"[A-Za-z0-9_-]{36}")  #: 27 bytes: delivery key, number, signature
#: ASCII only. A letter of another script right after it may belong to the address, so the link then stays. After it may
#: come ASCII, or general, Chinese and full-width punctuation.
LINK = re.compile(
    r"https?://(?=[a-z0-9])[a-z0-9\-._~:/?#@!$&*+,;=%()]++(?![^\x00-\x7f\u2000-\u206f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20])",
    re.IGNORECASE | re.ASCII,
)
ENDS = ".,;:!?*_~"  #: punctuation of the sentence or of Markdown


def tracks_links(template: TemplateSpec, channel: Channel) -> bool:
    """Return whether links of this template are rewritten for this channel. A robot speaks to a group, not a person."""
    if not settings.AFTERTOUCH_LINK_BASE_URL:
        return False
    return template.tracks_links and bool(channel.address_key or not channel.needs_target)


def rewrite_links(message: Message) -> Message:
    """Return the message with redirects instead of links."""
    if "://" not in message.body:
        return message
    base = settings.AFTERTOUCH_LINK_BASE_URL.rstrip("/")
    own = (f"{base}/l/", f"{settings.AFTERTOUCH_BASE_URL.rstrip('/')}/u/")

    def redirect(number: int, target: str) -> str:
        if number >= MOST_LINKS or target.startswith(own):
            return target
        return f"{base}/l/{make_link_token(message.delivery_key, number)}"

    return message._replace(body=_replace_links(message.body, redirect))


def find_link(text: str, number: int) -> str:
    """Return the link of this number in a text, or "". In HTML, `&amp;` of a link means `&`."""
    found: list[str] = []

    def note(_: int, target: str) -> str:
        found.append(target)
        return target

    _replace_links(text, note)
    return found[number].replace("&amp;", "&") if number < len(found) else ""


def _replace_links(text: str, replace: Callable[[int, str], str]) -> str:
    count = -1

    def act(match: re.Match[str]) -> str:
        nonlocal count
        # Without the end of the sentence, or of the Markdown link around it.
        link, depth = match[0], 0
        for place, letter in enumerate(link):
            depth += (letter == "(") - (letter == ")")
            if depth < 0:
                link = link[:place]
                break
        target = link.rstrip(ENDS)
        count += 1
        return replace(count, target) + match[0][len(target) :]

    return LINK.sub(act, text)


# --- tokens -----------------------------------------------------------------------------------------------------------


def make_link_token(delivery_key: UUID, number: int) -> str:
    content = delivery_key.bytes + bytes([number])
    return urlsafe_b64encode(content + _sign(content, settings.SECRET_KEY)).decode()


def read_link_token(token: str) -> tuple[UUID, int]:
    """Return the delivery key and the number of the link.

    Raises:
        BadSignature: `make_link_token` did not make it, or its key is gone.
    """
    if not TOKEN.fullmatch(token):
        raise BadSignature("not a token")
    raw = urlsafe_b64decode(token)
    content, signature = raw[:-SIGNATURE], raw[-SIGNATURE:]
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    if not any(constant_time_compare(signature, _sign(content, key)) for key in keys):
        raise BadSignature("not a token")
    return UUID(bytes=content[:16]), content[16]


@lru_cache(maxsize=4)
def _derive_key(secret: str | bytes) -> bytes:
    return salted_hmac(SALT, "", secret=secret, algorithm="sha256").digest()


def _sign(content: bytes, secret: str | bytes) -> bytes:
    return salted_hmac(SALT, content, secret=_derive_key(secret), algorithm="sha256").digest()[:SIGNATURE]
