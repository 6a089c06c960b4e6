"""Links inside the repository lead somewhere, and what they name is under version control's eye."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from config.environment import ROOT
from tests.docs.pages import anchors, images, links, name, pages


@pytest.mark.parametrize("path", pages(), ids=name)
def test_relative_link_target_exists(path: Path) -> None:
    broken = []
    for target in links(path.read_text("utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there.read_text("utf-8"))):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("path", pages(), ids=name)
def test_picture_file_exists(path: Path) -> None:
    for target in images(path.read_text("utf-8")):
        assert (path.parent / target).stat().st_size > 1_000, target


def test_every_screenshot_is_used_in_a_page() -> None:
    shown = {(page.parent / target).resolve() for page in pages() for target in images(page.read_text("utf-8"))}
    assert sorted(path.name for path in set((ROOT / "docs/screenshots").iterdir()) - shown) == []


def test_index_links_every_page() -> None:
    """Decisions are found by their folder."""
    index = ROOT / "docs/README.md"
    led = {(index.parent / target.partition("#")[0]).resolve() for target in links(index.read_text("utf-8"))}
    lost = [page for page in (ROOT / "docs").rglob("*.md") if page not in led and page.parent.name != "decisions"]
    assert [name(page) for page in lost if page != index] == []


@pytest.mark.parametrize("path", pages(), ids=name)
def test_named_test_files_exist(path: Path) -> None:
    """Tests move; a page that names one as proof must follow."""
    named = re.findall(r"`(tests/[\w/.-]+)(?:::\w+)?`", path.read_text("utf-8"))
    assert [each for each in named if not (ROOT / each).exists()] == []


def test_code_map_names_are_defined_in_their_modules() -> None:
    """A function moves or is renamed; its row must follow."""
    page = ROOT / "docs/reference/code-map.md"
    rows = re.findall(r"\]\(([\w./]+)\)((?: `\w+`)+)", page.read_text("utf-8"))
    assert len(rows) > 40
    missing = [
        f"{path}: {each}"
        for path, names in rows
        for each in re.findall(r"\w+", names)
        if not re.search(rf"\b(?:def|class|function) {each}\b", (page.parent / path).read_text("utf-8"))
    ]
    assert missing == []
