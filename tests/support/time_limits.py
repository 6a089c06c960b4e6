"""Time limits of tests: a hang ends as a failure.

pytest-timeout raises a failure in the main thread when a limit is over. That does not end a test whose threads hang:
the failure waits for them in `ThreadPoolExecutor.__exit__`. So a second limit dumps all stacks and ends the process.
With xdist the test counts as failed, and another process runs the rest.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator
from typing import TextIO

import pytest

LIMITS = (
    ("campaign", 7200),
    ("faults", 900),
    ("processes", 900),
)  #: seconds by marker; the default is `timeout` in pyproject.toml
CLEAN_UP = float(os.environ.get("AFTERTOUCH_TEST_CLEAN_UP", "120"))  #: seconds for the fixtures' end after a failure

_stderr = pytest.StashKey[TextIO]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            limit = next((seconds for marker, seconds in LIMITS if item.get_closest_marker(marker)), None)
            if limit is not None:
                item.add_marker(pytest.mark.timeout(limit))


def pytest_configure(config: pytest.Config) -> None:
    # A file of its own: while tests run, pytest captures what is written to the standard one.
    config.stash[_stderr] = os.fdopen(os.dup(2), "w")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit = seconds_for(item)
    if limit:
        faulthandler.dump_traceback_later(limit + CLEAN_UP, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def seconds_for(item: pytest.Item) -> float:
    """The limit that pytest-timeout applies to this test; 0 for none."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    given = item.config.getoption("timeout")
    if given is None:
        given = os.environ.get("PYTEST_TIMEOUT") or item.config.getini("timeout")
    return float(given or 0)


def pytest_enter_pdb() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """The interpreter waits for threads that a failed test left: not for ever.

    A process of xdist that has done its share waits for the others.
    """
    if sys.__stderr__ is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        faulthandler.dump_traceback_later(CLEAN_UP, exit=True, file=sys.__stderr__)
