"""The pool runs in processes that have not loaded Django's applications."""

from __future__ import annotations

import subprocess
import sys

import pytest

from config.environment import ROOT

LOOK = "import sys, importlib; importlib.import_module({!r}); print(sorted(m for m in sys.modules if '.models' in m))"


@pytest.mark.parametrize(
    "module",
    ["rpa_tasks.isolation", "rpa_tasks.browsers.pool", "rpa_tasks.browsers.shutdown", "rpa_tasks.supervisor.client"],
)
def test_pool_modules_load_no_models(module: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", LOOK.format(module)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "rpa_tasks.models" not in shown.stdout


@pytest.mark.parametrize(
    "module", ["rpa_tasks.browsers.playwright_driver", "rpa_tasks.flow_sdk", "rpa_tasks.supervisor.main"]
)
def test_supervisor_and_flow_modules_load_no_django(module: str) -> None:
    look = f"import sys, {module}; print('django' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"
