"""The threat model names tests that exist, and a test for each threat."""

import ast
import re
from functools import cache
from pathlib import Path

from django.conf import settings

ROOT = settings.BASE_DIR
PAGE = (ROOT / "docs" / "explanation" / "threat-model.md").read_text("utf-8")


@cache
def names_in(path):
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_tests_named_by_threat_model_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    gone = [
        f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in names_in(ROOT / path)
    ]
    assert gone == []


def test_each_threat_names_a_test():
    tables = re.findall(r"\| threat \| defence \| tests \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 30
    assert [row for row in rows if "::test_" not in row.split("|")[3]] == []


def test_threat_model_names_each_security_test_file():
    """Return all tests except those that show that a defence does not hinder normal use."""
    here = Path(__file__).parent
    unlisted = {path.name for path in here.glob("test_*.py") if f"tests/security/{path.name}" not in PAGE}
    assert unlisted == {Path(__file__).name}
