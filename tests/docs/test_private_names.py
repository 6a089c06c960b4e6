"""Tests use the public names of the product."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from config.environment import ROOT
from tests.docs.test_layout import PRODUCT

PRIVATE = re.compile(r"(?:[\w.]+\.)?_[a-z]\w*|_[A-Z]\w*")


def find_private_uses(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that are imported from the product or replaced by `setattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PRODUCT:
            yield from (each.name for each in node.names if PRIVATE.fullmatch(each.name))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"setattr", "delattr", "object"}:
            words = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            yield from (each for each in words if isinstance(each, str) and PRIVATE.fullmatch(each))


def test_tests_neither_import_nor_replace_private_names() -> None:
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if uses := list(find_private_uses(ast.parse(path.read_text("utf-8")))):
            found[str(Path(path).relative_to(ROOT))] = uses
    assert found == {}


def test_find_private_uses_finds_imports_and_replacements() -> None:
    text = """
from scheduling.delivery.sender import Sender, _lock
from celery import _state
monkeypatch.setattr(sender, "_pending", 1)
monkeypatch.setattr("scheduling.delivery.sender._pending", 1)
patch.setattr(sender, "__call__", 1)
"""
    expected = ["_lock", "_pending", "scheduling.delivery.sender._pending"]
    assert list(find_private_uses(ast.parse(text))) == expected
