"""One stack for most of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rpa_tasks.faults.rpa_cluster import RpaCluster, run_rpa_cluster


@pytest.fixture(scope="session")
def shared_rpa_cluster(state_folder) -> Iterator[RpaCluster]:
    with run_rpa_cluster(state_folder("rpa")) as made:
        yield made


@pytest.fixture
def rpa_cluster(shared_rpa_cluster) -> Iterator[RpaCluster]:
    """The shared one; afterwards nothing waits in it for the next test's nodes."""
    yield shared_rpa_cluster
    shared_rpa_cluster.sql(
        "UPDATE rpa_tasks_job SET state = 'cancelled', settled_at = now(), lease_until = NULL"
        " WHERE state IN ('scheduled', 'queued', 'running')"
    )
    shared_rpa_cluster.sql("UPDATE rpa_tasks_lane SET task_id = NULL WHERE task_id IS NOT NULL")
    shared_rpa_cluster.wait(lambda: not shared_rpa_cluster.commands_left(), "no command is left", pause=0.2)
