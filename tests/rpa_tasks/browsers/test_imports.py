"""The pool runs in processes that have not loaded Django's applications."""

from __future__ import annotations

import subprocess
import sys

import pytest

from config.environment import ROOT

LOOK = """
import sys, importlib
for name in {names!r}:
    importlib.import_module(name)
    if {unwanted!r} in sys.modules:
        sys.exit(f"{{name}} loads it")
"""


@pytest.mark.parametrize(
    ("unwanted", "names"),
    [
        ("rpa_tasks.models", ("rpa_tasks.isolation", "rpa_tasks.browsers.upkeep", "rpa_tasks.supervisor.client")),
        ("django", ("rpa_tasks.browsers.devtools", "rpa_tasks.flow_sdk", "rpa_tasks.supervisor.main")),
    ],
    ids=["pool", "supervisor and flow"],
)  # fmt: skip
def test_modules_of_pool_load_no_models_and_of_flows_no_django(unwanted: str, names: tuple[str, ...]) -> None:
    look = LOOK.format(names=names, unwanted=unwanted)
    subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=True)


def test_supervisor_process_imports_no_costly_module() -> None:
    """One starts for each run; these modules would cost half of its processor time."""
    look = f"""
import sys
sys.path.append({str(ROOT)!r})
import rpa_tasks.supervisor.event_loop
print(sorted({{"enum", "json", "re", "typing"}} & set(sys.modules)))
"""
    words = [sys.executable, "-I", "-S", "-c", look]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == "[]"
