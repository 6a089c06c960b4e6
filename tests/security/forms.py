"""Read the form of a page, so that a test can post what a browser would post."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

Values = dict[str, list[str]]

UNSENT = {"submit", "button", "image", "reset", "file"}


@dataclass(slots=True)
class Form:
    """`values` are what a browser sends when nothing is typed, without the buttons."""

    method: str
    action: str
    values: Values = field(default_factory=dict)

    def add(self, name: str, value: str) -> None:
        self.values.setdefault(name, []).append(value)


@dataclass(slots=True)
class _Select:
    name: str
    multiple: bool
    chosen: list[str] = field(default_factory=list)
    first: str | None = None


class _Reader(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.forms: list[Form] = []
        self._open: Form | None = None
        self._select: _Select | None = None
        self._area: tuple[str, list[str]] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if tag == "form":
            self._open = Form(known.get("method", "get").lower(), known.get("action", ""))
            self.forms.append(self._open)
        elif self._open is None or "disabled" in known:
            return
        elif tag == "input":
            self._take(self._open, known)
        elif tag == "select":
            self._select = _Select(known.get("name", ""), "multiple" in known)
        elif tag == "option" and self._select is not None:
            value = known.get("value", "")
            if self._select.first is None:
                self._select.first = value
            if "selected" in known:
                self._select.chosen.append(value)
        elif tag == "textarea":
            self._area = known.get("name", ""), []

    def _take(self, form: Form, known: dict[str, str]) -> None:
        kind = known.get("type", "text")
        ticked = kind not in ("checkbox", "radio") or "checked" in known
        if known.get("name") and kind not in UNSENT and ticked:
            form.add(known["name"], known.get("value", "on" if kind == "checkbox" else ""))

    def handle_data(self, data: str) -> None:
        if self._area is not None:
            self._area[1].append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._open = None
        if self._open is None:
            return
        if tag == "select" and self._select is not None:
            chosen = self._select.chosen
            if not chosen and not self._select.multiple and self._select.first is not None:
                chosen = [self._select.first]
            for value in chosen:
                self._open.add(self._select.name, value)
            self._select = None
        elif tag == "textarea" and self._area is not None:
            name, parts = self._area
            self._open.add(name, "".join(parts).removeprefix("\n"))
            self._area = None


def main_form(page: str) -> Form | None:
    """Return the largest form that posts to the page's own address; None where there is none."""
    found = [form for form in _Reader(page).forms if form.method == "post" and not form.action]
    return max(found, key=lambda form: len(form.values), default=None)
