"""Tests in several processes: most of them wait most of the time. Each process has servers of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from config.environment import environment

# More than this wait for the longest folder of faults and gain nothing.
MOST = 4


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
        folder = path.rpartition("/")[0]
        return folder if is_fault_test(path) else path


def is_fault_test(path: str) -> bool:
    return "faults" in path.split("/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, or the last process would be alone with them."""
    items.sort(key=lambda item: not is_fault_test(item.nodeid.split("::", 1)[0]))
