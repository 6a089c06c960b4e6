"""Tests in several processes, each with servers of its own. The order of each process is the same in every run.

What a process runs, and in which order, depends on the collected files and on the number of processes only. A failure
that depends on the tests before it can then be repeated.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from config.environment import environment

MOST = 4
SECONDS_A_TEST = 0.1  #: of a file that is not below
#: Seconds of wall time of the files that take longest, as `--durations=0` shows them. They balance the processes only.
SECONDS: dict[str, float] = {
    "tests/language/test_pages.py": 24, "tests/rpa_tasks/core/test_runner.py": 19,
    "tests/scheduling/admin/test_shown_values.py": 14, "tests/scheduling/admin/test_undo.py": 9,
    "tests/scheduling/api/test_customer_erasure.py": 12, "tests/scheduling/api/test_redirects.py": 11,
    "tests/scheduling/config_file/test_apply.py": 15, "tests/scheduling/config_file/test_bootstrap.py": 10,
    "tests/scheduling/core/test_admission.py": 18, "tests/scheduling/core/test_caps.py": 15,
    "tests/scheduling/core/test_consent.py": 14, "tests/scheduling/core/test_delivery.py": 9,
    "tests/scheduling/core/test_failed_tasks.py": 13, "tests/scheduling/core/test_query_plans.py": 9,
    "tests/scheduling/core/test_random_lifecycles.py": 15, "tests/scheduling/replay/test_replay.py": 33,
    "tests/scheduling/webhooks/test_sending.py": 12, "tests/security/test_admin_rights.py": 70,
    "tests/security/test_entry_points.py": 15, "tests/security/test_lookups.py": 10,
    "tests/security/test_markup.py": 10, "tests/sessions/test_state_machine.py": 24,
    "tests/sessions/websocket/test_chat_client.py": 12, "tests/sessions/websocket/test_consumer.py": 13,
    "tests/sessions/websocket/test_gateway.py": 15, "tests/sessions/websocket/test_outages.py": 10,
    "tests/smoke/test_running_stack.py": 41,
    # of `make processes`
    "tests/deploy/test_containers.py": 18, "tests/deploy/test_keep_the_data.py": 96,
    "tests/deploy/test_pgbouncer.py": 44, "tests/docs/test_own_rpa_program.py": 36,
    "tests/docs/test_walkthroughs.py": 207, "tests/docs/test_write_a_flow.py": 59,
    "tests/journeys/test_accessibility.py": 202, "tests/journeys/test_clicks.py": 25,
    "tests/journeys/test_conditions_and_times.py": 16, "tests/journeys/test_customer_import.py": 25,
    "tests/journeys/test_dashboard.py": 26, "tests/journeys/test_failed_tasks.py": 24,
    "tests/journeys/test_hidden_tabs.py": 90, "tests/journeys/test_live_chats.py": 19,
    "tests/journeys/test_page_headers.py": 14, "tests/journeys/test_people.py": 16,
    "tests/journeys/test_replay.py": 24, "tests/journeys/test_rpa_operations.py": 34,
    "tests/journeys/test_take_over.py": 15, "tests/local_stack/test_embedded_servers.py": 98,
    "tests/local_stack/test_invalid_settings.py": 23, "tests/local_stack/test_stack.py": 52,
    "tests/rpa_tasks/browsers/test_concurrency.py": 46, "tests/rpa_tasks/browsers/test_killed_processes.py": 17,
    "tests/rpa_tasks/browsers/test_maintainer.py": 39, "tests/rpa_tasks/browsers/test_pool.py": 18,
    "tests/rpa_tasks/browsers/test_take_over.py": 38, "tests/rpa_tasks/browsers/test_take_over_files.py": 22,
    "tests/rpa_tasks/browsers/test_upkeep.py": 30, "tests/rpa_tasks/flow/test_browser.py": 31,
    "tests/rpa_tasks/flow/test_demo_batch_reply.py": 20, "tests/rpa_tasks/flow/test_demo_sync_order.py": 49,
    "tests/rpa_tasks/isolation/test_start.py": 21, "tests/rpa_tasks/supervisor/test_command_end.py": 17,
    "tests/scheduling/admin/test_read_replica.py": 45, "tests/scheduling/api/test_outages.py": 18,
    "tests/scheduling/metrics/test_worker_reports.py": 33, "tests/security/test_incomplete_requests.py": 14,
    "tests/security/test_nginx.py": 18, "tests/security/test_tls.py": 58,
    "tests/sessions/websocket/test_chat_page.py": 98,
}  # fmt: skip


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means: as many as cores; none for tests picked by hand, or where all would share one Redis."""
    picked = config.option.keyword or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if picked or environment().redis_url:
        return 0
    return min(len(os.sched_getaffinity(0)), MOST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return FixedSplit(config, log)


class FixedSplit(LoadScopeScheduling):
    """Give each process its share of the files before the run. A replaced process's share goes to its successor."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self.shares: dict[str, int] = {}  #: the number of the process that runs a file
        self.numbers: dict[WorkerController, int] = {}

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0]

    def add_node(self, node: WorkerController) -> None:
        super().add_node(node)
        self.numbers[node] = min(set(range(self.numnodes)) - set(self.numbers.values()))

    def remove_node(self, node: WorkerController) -> str | None:
        del self.numbers[node]
        crashed = super().remove_node(node)
        if crashed is not None:
            self.workqueue[self._split_scope(crashed)][crashed] = True  # reported as failed; xdist would run it again
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        if node.shutting_down or self._pending_of(self.assigned_work[node]) > 2:
            return
        if any(self.shares[path] == self.numbers[node] for path in self.workqueue):
            self._assign_work_unit(node)
        else:
            node.shutdown()

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self.shares:
            self.shares = split_files({path: len(tests) for path, tests in self.workqueue.items()}, self.numnodes)
        own = next((path for path in self.workqueue if self.shares[path] == self.numbers[node]), None)
        if own is not None:
            self.workqueue.move_to_end(own, last=False)
            super()._assign_work_unit(node)


def split_files(tests: dict[str, int], processes: int) -> dict[str, int]:
    """Return the process of each file, from the number of its tests: the longest first, to the least loaded process."""
    loads = [0.0] * processes
    shares = {}
    seconds = {path: SECONDS.get(path, count * SECONDS_A_TEST) for path, count in tests.items()}
    for path in sorted(seconds, key=lambda path: (-seconds[path], path)):
        shares[path] = loads.index(min(loads))
        loads[shares[path]] += seconds[path]
    return shares
