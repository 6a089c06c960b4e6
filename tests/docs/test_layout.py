"""The layout rules of decision 27."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from config.environment import ROOT

PRODUCT = ("config", "scheduling", "rpa_tasks", "sessions", "examples")
MOST_MODULES = 16


def test_folder_of_the_product_has_at_most_16_modules() -> None:
    modules = [path for app in PRODUCT for path in (ROOT / app).rglob("*.py")]
    counts = Counter(path.parent for path in modules if path.name != "__init__.py" and "migrations" not in path.parts)
    assert len(counts) > 30
    assert {
        str(Path(folder).relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_MODULES
    } == {}
