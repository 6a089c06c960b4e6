"""Tests in several processes: most of them wait most of the time. Each process has servers of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from config.environment import environment

# More than this wait for the longest folder of faults and gain nothing.
MOST = 4
#: Files of faults whose tests start servers of their own, and share none with the rest of their folder.
OWN_SERVERS = {
    "tests/faults/test_backlog.py", "tests/faults/test_blocked_broker.py", "tests/faults/test_brokers.py",
    "tests/sessions/faults/test_cluster.py", "tests/sessions/faults/test_sentinel.py",
}  # fmt: skip
SWEEP = "tests/security/test_admin_rights.py"  #: its tests are long and share nothing
#: Other files that take a minute or more: the sweep of rights, nested runs, stacks and browsers.
LONG = (SWEEP, "tests/local_stack/", "tests/deploy/", "tests/journeys/", "tests/docs/")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means: one process for tests picked by hand, and where all would share one Redis."""
    picked = config.option.keyword or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if picked or environment().redis_url:
        return 0
    return min((os.cpu_count() or 1) + 1, MOST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return ByFolderOrFile(config, log)


class ByFolderOrFile(LoadScopeScheduling):
    """A file stays in one process, and so does a folder of faults: they share a stack that starts slowly."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        if path == SWEEP:
            return nodeid
        folder = path.rpartition("/")[0]
        return folder if is_fault_test(path) and path not in OWN_SERVERS else path


def is_fault_test(path: str) -> bool:
    return "faults" in path.split("/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, or the last process would be alone with them."""
    items.sort(key=lambda item: rank_path(item.nodeid.split("::", 1)[0]))


def rank_path(path: str) -> int:
    """Return the place in the order of the run: shared stacks of faults, long files, all others."""
    if is_fault_test(path):
        return 1 if path in OWN_SERVERS else 0
    return 2 if path.startswith(LONG) else 3
