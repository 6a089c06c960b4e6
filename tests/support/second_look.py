"""Run failed tests once more, each alone in a fresh process with fresh servers.

A test that passes then depends on its neighbours or on pace. It is printed as UNSTABLE with its first traceback, and
does not fail the run. Tests with the marker `proof` are not run again. The last lines of a run name the tests that are
FAILED and those that are UNSTABLE.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile

import pytest

MOST = 5  #: failed tests; more have a common cause
LIMIT = 1800.0  #: seconds for one test with its servers

_failed = pytest.StashKey[list[str]]()
_unstable = pytest.StashKey[list[str]]()


@pytest.hookimpl(trylast=True)  # after xdist has ended its processes
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Move the reports of unstable tests out of the failures, so that these alone decide how the run ends."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("PYTEST_XDIST_WORKER") or reporter is None:
        return
    outcomes = ("failed", "error")
    reports = [report for outcome in outcomes for report in reporter.stats.get(outcome, [])]
    failed = config.stash[_failed] = sorted({report.nodeid for report in reports})
    unstable = config.stash[_unstable] = []
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not config.getoption("second_look"):
        return
    proofs = {report.nodeid for report in reports if "proof" in getattr(report, "keywords", {})}
    if len(failed) <= MOST:
        unstable += [name for name in failed if name not in proofs and passes_alone(name)]
    for outcome in outcomes:
        kept = [report for report in reporter.stats.pop(outcome, []) if report.nodeid not in unstable]
        if kept:
            reporter.stats[outcome] = kept
    reporter.stats.setdefault("unstable", []).extend(report for report in reports if report.nodeid in unstable)
    failed[:] = [name for name in failed if name not in unstable]
    if not failed:
        session.exitstatus = pytest.ExitCode.OK


def passes_alone(name: str) -> bool:
    folder = tempfile.mkdtemp(prefix="alone-")
    os.chmod(folder, 0o755)  # for root, PostgreSQL runs under another account
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environ["AFTERTOUCH_STATE_DIR"] = os.path.join(folder, "state")
    print(f"\nonce more, alone: {name}", flush=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", name],
            env=environ, capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode != 0:
        print(done.stdout[-20_000:], flush=True)
    return done.returncode == 0


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unstable = config.stash.get(_unstable, [])
    if unstable:
        terminalreporter.section("UNSTABLE: failed, then passed alone")
        for report in terminalreporter.stats["unstable"]:
            terminalreporter.write_line(f"_____ {report.nodeid}")
            terminalreporter.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Name them below the line of figures, where a reader of the log looks first."""
    for name in config.stash.get(_failed, []):
        print(f"FAILED {name}")
    for name in config.stash.get(_unstable, []):
        print(f"UNSTABLE {name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-look", action="store_true", help="run failed tests once more, each alone; at most five")
