"""Reading the pages of this repository: their blocks, links, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from config.environment import ROOT

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\]\\]|\\.)*\]\(<?([^)\s>]+)>?\)")


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, `console` or `mermaid` and so on."""
    return [body for found, body in _FENCE.findall(text) if found == language]


def prose(text: str) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", text)


def commands(text: str) -> list[str]:
    """Return the lines of all console blocks without their markers."""
    lines = (line.partition(" #")[0].rstrip() for block in blocks(text, "console") for line in block.splitlines())
    return [line for line in lines if line]


def images(text: str) -> list[str]:
    return re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", prose(text)) + re.findall(r'<img[^>]* src="([^"]+)"', prose(text))


def inline_code(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", prose(text)))


def links(text: str) -> Iterator[str]:
    """Targets of all links, without code, where brackets mean something else."""
    yield from _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(text)))


def anchors(text: str) -> set[str]:
    """Return the anchors of this page."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", prose(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        number = 1
        while (unique := slug if slug not in found else f"{slug}-{number}") in found:
            number += 1
        found.add(unique)
    return found


def table(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, its own head left out; `\\|` is a bar inside of a cell."""
    section = text.split(f"\n{heading}\n", 1)[1]
    rows = []
    for line in section.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]])
        elif rows:
            break
    return rows[2:]
