"""Find the mentions and buttons that a text ends with, and escape the values in it."""

from __future__ import annotations

import re
from typing import NamedTuple

MENTIONS = re.compile(r"(?:@[\w.+-]{1,64}\s*)+")
PHONE_NUMBER = re.compile(r"\+?[0-9]{5,20}")
BUTTON = re.compile(r"\[([^\[\]\n]{1,60})\]\((https?://[^\s()]{1,2000})\)")
MOST_BUTTONS = 5
ALL = "all"

#: A value prints the full-width form of characters that vendors read as markup. No vendor documents an escape for all
#: its formats, and an address in a link keeps its other characters.
_TAGS = {ord(each): ord(each) + 0xFEE0 for each in "<>"}
_ADDRESS = re.compile(r"https?://[^\s<>]+")
_PERCENT = {ord(each): f"%{ord(each):02X}" for each in "[]()*`@"}
_MARKDOWN = {ord(each): ord(each) + 0xFEE0 for each in "<>[]*`"}
_MENTION = {ord("@"): ord("@") + 0xFEE0}


class BadContent(ValueError):
    """The rendered text of a message does not fit the channel."""


class Mentions(NamedTuple):
    """Members to notify: everyone, phone numbers, and the vendor's user ids."""

    everyone: bool = False
    phones: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


class Card(NamedTuple):
    """A title, a text and up to five buttons: label and address."""

    title: str
    text: str
    buttons: list[tuple[str, str]]


def escape_tags(value: str) -> str:
    """Return a value without tags, such as `<at user_id="all">` or a link."""
    return value.translate(_TAGS)


def escape_markdown(value: str) -> str:
    """Return a value without tags, links, emphasis and code. An address leads where it led."""
    return value.translate(_PERCENT if _ADDRESS.fullmatch(value) else _MARKDOWN)


def escape_mentions(value: str) -> str:
    """Return a value that mentions no one by itself, and not everyone after an “@” of the author."""
    value = value.translate(_PERCENT if _ADDRESS.fullmatch(value) else _MENTION)
    return f"{value}\N{ZERO WIDTH SPACE}" if value.strip().lower() == ALL else value


def split_mentions(body: str) -> tuple[str, Mentions]:
    """Return the text without a last line of mentions such as “@all @13800138000 @zhangsan”, and the mentions."""
    text, _, last = body.rstrip().rpartition("\n")
    if not text.strip() or not MENTIONS.fullmatch(last):
        return body, Mentions()
    names = dict.fromkeys(last.replace("@", " ").split())
    phones = tuple(name for name in names if PHONE_NUMBER.fullmatch(name))
    return text, Mentions(ALL in names, phones, tuple(name for name in names if name != ALL and name not in phones))


def read_card(subject: str, body: str, *, fewest_buttons: int = 1) -> Card:
    """Return the card of a message. Last lines such as “[Open](https://…)” are its buttons.

    Without a subject the first line is the title.

    Raises:
        BadContent: there are fewer buttons.
    """
    lines = body.strip().split("\n")
    buttons: list[tuple[str, str]] = []
    while lines and len(buttons) < MOST_BUTTONS and (found := BUTTON.fullmatch(lines[-1].strip())):
        buttons.insert(0, (found[1], found[2]))
        lines.pop()
    if len(buttons) < fewest_buttons:
        raise BadContent("a card needs a last line like “[Open](https://example.com)”")
    title = " ".join(subject.split())
    if not title and lines:
        title = " ".join(lines.pop(0).lstrip("# ").split())
    return Card(title or "…", "\n".join(lines).strip() or title or "…", buttons)
