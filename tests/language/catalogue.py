"""Reading gettext's catalogues as they are written, comments and all."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from config.environment import ROOT

PACKAGES = ("scheduling", "rpa_tasks", "sessions", "config", "examples")
#: Strings of libraries that have no translation of their own.
THIRD_PARTY = ROOT / "config/third_party/locale/zh_Hans/LC_MESSAGES/django.po"
CATALOGUES = sorted(
    {path for name in PACKAGES for path in (ROOT / name).rglob("locale/zh_Hans/LC_MESSAGES/django.po")} - {THIRD_PARTY}
)
SCRIPTS = ROOT / "scheduling/locale/zh_Hans/LC_MESSAGES/djangojs.po"

Word = tuple[str, str]  #: context and singular


@dataclass
class Entry:
    fuzzy: bool = False
    obsolete: bool = False
    said: dict[str, str] = field(default_factory=dict)  #: msgctxt, msgid, msgid_plural, msgstr, msgstr[0] …

    @property
    def word(self) -> Word:
        return self.said.get("msgctxt", ""), self.said["msgid"]

    @property
    def translations(self) -> list[str]:
        return [text for name, text in self.said.items() if name.startswith("msgstr")]


def entries(path: Path) -> list[Entry]:
    """All of a file but its head."""
    found = [_entry(block) for block in re.split(r"\n\s*\n", path.read_text("utf-8"))]
    return [entry for entry in found if entry.said.get("msgid")]


def _entry(block: str) -> Entry:
    entry, name = Entry(), ""
    for line in block.splitlines():
        if line.startswith("#,"):
            entry.fuzzy = "fuzzy" in line
        if line.startswith("#~"):
            entry.obsolete = True
            line = line.removeprefix("#~").strip()
        if begins := re.match(r'(msg\S+) (".*")$', line):
            name = begins[1]
            entry.said[name] = ast.literal_eval(begins[2])
        elif line.startswith('"') and name:
            entry.said[name] += ast.literal_eval(line)
    return entry
