"""Tests use the public names of the product."""

import ast
import re
from pathlib import Path

from config.environment import ROOT
from tests.docs.test_layout import PRODUCT

#: Of a file that may have any: a third of them. To parse one takes 10 ms.
MAY_BE = re.compile(r"import .*\b_|^ +(\w+, )*_\w+(, \w+)*,?$|(setattr|delattr|object)\(", re.MULTILINE)
PRIVATE = re.compile(r"(?:[\w.]+\.)?_[a-z]\w*|_[A-Z]\w*")


def find_private_uses(tree):
    """Yield the private names that are imported from the product or replaced by `setattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PRODUCT:
            yield from (each.name for each in node.names if PRIVATE.fullmatch(each.name))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"setattr", "delattr", "object"}:
            words = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            yield from (each for each in words if isinstance(each, str) and PRIVATE.fullmatch(each))


def test_tests_neither_import_nor_replace_private_names():
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text("utf-8")
        if MAY_BE.search(text) and (uses := list(find_private_uses(ast.parse(text)))):
            found[str(Path(path).relative_to(ROOT))] = uses
    assert found == {}
