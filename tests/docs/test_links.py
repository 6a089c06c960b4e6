"""Links inside the repository lead somewhere, and what they name is under version control's eye."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import anchors, images, links, name, pages


@pytest.mark.parametrize("page", pages(), ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in links(page.read_text("utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there.read_text("utf-8"))):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", pages(), ids=name)
def test_pictures_have_a_file_of_their_own(page: Path) -> None:
    for target in images(page.read_text("utf-8")):
        assert (page.parent / target).stat().st_size > 1_000, target
