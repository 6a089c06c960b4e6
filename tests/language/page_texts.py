"""Every page of the back office, and the words that can be read on it."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from django.contrib import admin
from django.db.models import Model
from django.urls import NoReverseMatch, get_resolver, reverse

#: Read out, or shown on hovering.
SPOKEN = {"title", "placeholder", "aria-label", "alt", "data-label"}
#: Code, data, pictures by name.
SILENT = {"script", "style", "pre", "code", "textarea", "svg", "kbd"}
SILENT_CLASSES = {"material-symbols-outlined", "at-mono", "at-code"}
VOID = {"br", "img", "input", "meta", "link", "hr", "source", "wbr", "col", "area", "base", "embed", "track", "param"}
#: They change who is logged in, or answer no page.
LEFT_OUT = {"login", "logout", "jsi18n", "autocomplete", "password_change_done"}


class Words(HTMLParser):
    """The texts of a page and what is spoken of its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if not self._hushed:
            self.found += [value for name, value in known.items() if name in SPOKEN]
            if tag == "input" and known.get("type") in ("submit", "button"):
                self.found.append(known.get("value", ""))
        if tag not in VOID:
            time_zone = tag == "option" and "/" in known.get("value", "")
            silent = tag in SILENT or time_zone or bool(SILENT_CLASSES & set(known.get("class", "").split()))
            self._open.append((tag, silent))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not self._hushed:
            self.found.append(data)

    @property
    def _hushed(self) -> bool:
        return any(silent for _, silent in self._open)


def words(page: str) -> list[str]:
    return [said for each in Words(page).found if (said := " ".join(each.split()))]


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
