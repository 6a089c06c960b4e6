"""Both READMEs have the same content in their languages."""

import re
import subprocess

from config.environment import ROOT
from tests.docs.pages import blocks, commands, images, inline_code, links
from tests.support.tables import each_row

ENGLISH = (ROOT / "README.md").read_text("utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text("utf-8")


def targets(text):
    return {target for target in links(text) if not target.startswith("README")}


def list_arrows(text):
    """The arrows of each diagram, without the words on them."""
    return [
        re.findall(r"^\s*(\w+)(?:\[.*?\]|\(.*?\)|\{.*?\})* *(-\.->|-->)", block, re.MULTILINE)
        for block in blocks(text, "mermaid")
    ]


@each_row("said", [commands, images, inline_code, targets, list_arrows])
def test_readmes_have_the_same_commands_and_links(said):
    assert callable(said)
    assert said(CHINESE) == said(ENGLISH)


def test_readmes_link_each_other():
    assert "README.zh-CN.md" in links(ENGLISH)
    assert "README.md" in links(CHINESE)


def test_chinese_readme_lines_are_chinese():
    """A paragraph added to one file only would remain English in the other."""
    for line in re.sub(r"^```.*?^```$", "", CHINESE, flags=re.MULTILINE | re.DOTALL).splitlines():
        words = re.findall(r"[A-Za-z]{2,}", re.sub(r"`[^`]*`|\]\([^)]*\)", "", line))
        assert len(words) < 8 or re.search(r"[\u4e00-\u9fff]", line), line


def test_make_lists_each_target():
    """The name of `test-all` has a hyphen, so the list left it out."""
    said = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (names,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^  make (\S+)", said, re.MULTILINE)) == set(names.split())
