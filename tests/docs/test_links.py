"""Links inside the repository lead somewhere, and what they name is under version control's eye."""

import re

from config.environment import ROOT
from tests.docs.pages import anchors, images, links, name, pages


def test_relative_link_targets_exist():
    broken = [f"{name(page)}: {target}" for page in pages() for target in links(page.read_text("utf-8"))
              if not leads_somewhere(page, target)]  # fmt: skip
    assert broken == []


def leads_somewhere(page, target):
    if "://" in target or target.startswith("mailto:"):
        return True
    file, _, anchor = target.partition("#")
    there = (page.parent / file).resolve() if file else page
    if not there.exists():
        return False
    return not anchor or there.suffix != ".md" or anchor in anchors(there.read_text("utf-8"))


def test_picture_files_exist():
    shown = [(page, target) for page in pages() for target in images(page.read_text("utf-8"))]
    assert len(shown) > 10
    assert [f"{name(page)}: {target}" for page, target in shown if not is_picture(page.parent / target)] == []


def is_picture(path):
    return path.exists() and path.stat().st_size > 1_000


def test_every_screenshot_is_used_in_a_page():
    shown = {(page.parent / target).resolve() for page in pages() for target in images(page.read_text("utf-8"))}
    assert sorted(path.name for path in set((ROOT / "docs/screenshots").iterdir()) - shown) == []


def test_index_links_every_page():
    """Decisions are found by their folder."""
    index = ROOT / "docs/README.md"
    led = {(index.parent / target.partition("#")[0]).resolve() for target in links(index.read_text("utf-8"))}
    lost = [page for page in (ROOT / "docs").rglob("*.md") if page not in led and page.parent.name != "decisions"]
    assert [name(page) for page in lost if page != index] == []


def test_named_test_files_exist():
    """Tests move; a page that names one as proof must follow."""
    named = [
        (page, path)
        for page in pages()
        for path in re.findall(r"`(tests/[\w/.-]+)(?:::\w+)?`", page.read_text("utf-8"))
    ]
    assert [f"{name(page)}: {path}" for page, path in named if not (ROOT / path).exists()] == []


def test_code_map_names_are_defined_in_their_modules():
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
