"""A test is skipped for what the machine has not, in words that the guard of CI knows: there nothing may be missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config.environment import ROOT
from tests.conftest import pytest_runtest_makereport
from tests.support.tables import each_row

KNOWN = "missing service: "
#: What no machine of CI can give: root for some of them, an installation that others may read.
OTHERS = {
    "only root can try what root and others do",
    "no Python that another account may run with these packages",
}


def list_skips(path: Path) -> Iterator[tuple[str, str]]:
    """Return the line and the start of the reason."""
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text)) if "skip" in text else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.importorskip", "unittest.skip",
        ):  # fmt: skip
            by_name = [each.value for each in node.keywords if each.arg == "reason"]
            yield f"{path.relative_to(ROOT)}:{node.lineno}", read_reason_prefix([*by_name, *node.args[:1]])


def read_reason_prefix(reasons: list[ast.expr]) -> str:
    reason = reasons[0] if reasons else None
    if isinstance(reason, ast.JoinedStr) and reason.values:
        reason = reason.values[0]
    return str(reason.value) if isinstance(reason, ast.Constant) else ""


def test_skip_reasons_use_known_words() -> None:
    found = [skip for path in sorted((ROOT / "tests").rglob("*.py")) for skip in list_skips(path)]
    assert len(found) > 15
    assert [skip for skip in found if not skip[1].startswith(KNOWN) and skip[1] not in OTHERS] == []


@each_row(
    "ci, reason, outcome",
    [
        ("true", f"{KNOWN}chromium", "failed"), ("", f"{KNOWN}chromium", "skipped"),
        ("true", "only root can try what root and others do", "skipped"),
    ],
)  # fmt: skip
def test_skip_for_missing_service_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, reason: str, outcome: str
) -> None:
    monkeypatch.setenv("CI", ci)
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test_it.py", 1, f"Skipped: {reason}"))
    made: Any = pytest_runtest_makereport(SimpleNamespace(nodeid="test_it"))  # type: ignore[arg-type]
    next(made)
    with suppress(StopIteration):
        made.send(report)
    assert report.outcome == outcome
