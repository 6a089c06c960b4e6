"""Every page of the back office, and the words that can be read on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from html.parser import HTMLParser
from typing import Any

from django.contrib import admin
from django.db.models import Model
from django.urls import NoReverseMatch, get_resolver, reverse

#: Read out, or shown on hovering.
SPOKEN = {"title", "placeholder", "aria-label", "alt", "data-label"}
#: Code, data, pictures by name, and names of time zones.
SILENT = {
    "script", "style", "pre", "code", "textarea", "svg", "kbd", "time zone", "material-symbols-outlined", "at-mono",
    "at-code",
}  # fmt: skip
VOID = {"br", "img", "input", "meta", "link", "hr", "source", "wbr", "col", "area", "base", "embed", "track", "param"}
#: They change who is logged in, or answer no page.
LEFT_OUT = {"login", "logout", "jsi18n", "autocomplete", "password_change_done"}


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    within: frozenset[str]  #: tags and classes of the elements around it
    instant: str = ""  #: title of the `<time>` around it


class Texts(HTMLParser):
    """The texts of a page and what is spoken of its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[Text] = []
        self._open: list[tuple[str, frozenset[str], str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        within, instant = self._around
        self.found += [Text(value, within) for name, value in known.items() if name in SPOKEN]
        if tag == "input" and known.get("type") in ("submit", "button"):
            self.found.append(Text(known.get("value", ""), within | {"button"}))
        if tag not in VOID:
            if tag == "time" and datetime.fromisoformat(known["datetime"]).tzinfo:
                instant = known.get("title", "")
            zone = {"time zone"} if tag == "option" and "/" in known.get("value", "") else set()
            self._open.append((tag, within | {tag, *known.get("class", "").split()} | zone, instant))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.found.append(Text(data, *self._around))

    @property
    def _around(self) -> tuple[frozenset[str], str]:
        return self._open[-1][1:] if self._open else (frozenset(), "")


def words(page: str) -> list[str]:
    return read_words(Texts(page).found)


def read_words(found: list[Text]) -> list[str]:
    texts = (" ".join(each.text.split()) for each in found if not each.within & SILENT)
    return [text for text in texts if text]


def every_page() -> list[str]:
    """Whatever has a name, and for each model one row with all that can be asked about it."""
    found = [reverse("admin:index"), *_reversible(_names())]
    for model in admin.site._registry:
        found += _pages(model)
    return list(dict.fromkeys(found))


def _pages(model: type[Model]) -> Iterator[str]:
    prefix = f"{model._meta.app_label}_{model._meta.model_name}_"
    row = model._default_manager.first()
    if row is not None:
        yield from _reversible([name for name in _names() if name.startswith(prefix)], row.pk)


def _reversible(names: list[str], *args: Any) -> Iterator[str]:
    for name in names:
        try:
            yield reverse(f"admin:{name}", args=args)
        except NoReverseMatch:
            continue


def _names() -> list[str]:
    resolver: Any = get_resolver()
    known = resolver.namespace_dict["admin"][1].reverse_dict
    return sorted(name for name in known if isinstance(name, str) and name not in LEFT_OUT)
