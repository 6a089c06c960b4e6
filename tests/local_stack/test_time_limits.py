"""A test that hangs is reported as failed, and the run goes on or ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from config.environment import ROOT

HANGING_TEST = """
import time

import pytest

def test_hangs():
    while True:
        time.sleep(0.05)

@pytest.mark.timeout(120)
def test_passes():
    pass
"""
HANGING_THREADS = """
import threading
import time
from concurrent.futures import ThreadPoolExecutor

def loop(_):
    while True:
        time.sleep(0.05)

def test_hangs_in_threads():
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(loop, range(2)))

def test_passes():
    pass
"""
LEFT_THREAD = """
import threading
import time

def test_passes():
    threading.Thread(target=time.sleep, args=[600]).start()
"""
MARKED = """
import pytest

@pytest.mark.parametrize("number", [1])
@pytest.mark.faults
def test_fault(request, number):
    print("limit of faults", request.node.get_closest_marker("timeout"))

@pytest.mark.campaign
def test_campaign(request):
    print("limit of campaign", request.node.get_closest_marker("timeout"))

@pytest.mark.faults
@pytest.mark.timeout(7)
def test_own(request):
    print("limit of its own", request.node.get_closest_marker("timeout"))
"""


def run_pytest(folder: Path, text: str, *words: str, limit: str = "1", clean_up: str = "3") -> tuple[int, str]:
    """Run one file of tests by the settings of this repository, without its servers."""
    file = folder / "test_sample.py"
    file.write_text(text)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environ |= {"PYTEST_TIMEOUT": limit, "AFTERTOUCH_TEST_CLEAN_UP": clean_up}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.support.time_limits", "-p", "no:cacheprovider",
         "-p", "no:randomly", "-p", "no:playwright", "--noconftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir",
         str(folder), *words, str(file)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_time_limit_fails_hanging_test_and_runs_the_rest(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, HANGING_TEST)
    assert code == 1
    assert "Timeout (>1.0s)" in output
    assert "1 failed, 1 passed" in output


def test_time_limit_with_hanging_threads_ends_process(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, HANGING_THREADS)
    assert code == 1
    assert "in test_hangs_in_threads" in output


def test_time_limit_in_xdist_worker_fails_test_and_runs_the_rest(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, HANGING_THREADS, "-n", "1")
    assert code == 1
    assert "crashed while running" in output
    assert "1 failed, 1 passed" in output


def test_left_thread_does_not_keep_process(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, LEFT_THREAD, limit="60")
    assert code == 1
    assert "1 passed" in output


def test_time_limit_follows_marker(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, MARKED, "-s", clean_up="60")
    assert code == 0
    found = dict(re.findall(r"limit of (.*) Mark\(.*args=\((\d+),\)", output))
    assert found == {"faults": "900", "campaign": "7200", "its own": "7"}
