"""The words that can be read on a page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from html.parser import HTMLParser

#: Read out, or shown on hovering.
SPOKEN = {"title", "placeholder", "aria-label", "alt", "data-label"}
#: Code, data, pictures by name, and names of time zones.
SILENT = {
    "script", "style", "pre", "code", "textarea", "svg", "kbd", "time zone", "material-symbols-outlined", "at-mono",
    "at-code",
}  # fmt: skip
VOID = {"br", "img", "input", "meta", "link", "hr", "source", "wbr", "col", "area", "base", "embed", "track", "param"}


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
