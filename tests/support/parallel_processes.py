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
SECONDS_A_TEST = 0.26  #: of a file that is not below
#: Seconds of wall time of the files that take longest, as `--durations=0` shows them. They balance the processes only.
SECONDS: dict[str, float] = {
    "tests/deploy/test_monitoring.py": 12, "tests/language/test_pages.py": 36,
    "tests/rpa_tasks/admin/test_matching_jobs.py": 9, "tests/rpa_tasks/admin/test_shops.py": 15,
    "tests/rpa_tasks/api/test_browser_settings.py": 11, "tests/rpa_tasks/api/test_schedules.py": 17,
    "tests/rpa_tasks/core/test_publish_many.py": 9, "tests/rpa_tasks/core/test_runner.py": 16,
    "tests/scheduling/admin/test_bulk_action.py": 10, "tests/scheduling/admin/test_conditions.py": 12,
    "tests/scheduling/admin/test_customer.py": 8, "tests/scheduling/admin/test_draft.py": 15,
    "tests/scheduling/admin/test_optimistic_lock.py": 9, "tests/scheduling/admin/test_overview.py": 8,
    "tests/scheduling/admin/test_undo.py": 15, "tests/scheduling/api/test_customer_erasure.py": 10,
    "tests/scheduling/api/test_fuzz.py": 9, "tests/scheduling/core/test_admission.py": 15,
    "tests/scheduling/core/test_bulk_actions.py": 10, "tests/scheduling/core/test_caps.py": 18,
    "tests/scheduling/core/test_consent.py": 13, "tests/scheduling/core/test_query_plans.py": 12,
    "tests/scheduling/core/test_random_lifecycles.py": 10, "tests/scheduling/core/test_retries.py": 11,
    "tests/scheduling/metrics/test_alerts.py": 9, "tests/scheduling/replay/test_replay.py": 14,
    "tests/scheduling/webhooks/test_sending.py": 14, "tests/security/test_admin_rights.py": 32,
    "tests/sessions/test_expired_keys.py": 12, "tests/sessions/websocket/test_chat_client.py": 8,
    "tests/sessions/websocket/test_gateway.py": 12, "tests/smoke/test_running_stack.py": 34,
    # of `make processes`
    "tests/deploy/test_containers.py": 8,
    "tests/deploy/test_pgbouncer.py": 38, "tests/deploy/test_prometheus.py": 11,
    "tests/docs/test_walkthroughs.py": 103, "tests/journeys/test_accessibility.py": 175,
    "tests/journeys/test_bulk_actions.py": 12, "tests/journeys/test_clicks.py": 33,
    "tests/journeys/test_conditions_and_times.py": 9, "tests/journeys/test_customer_import.py": 13,
    "tests/journeys/test_dashboard.py": 8, "tests/journeys/test_failed_tasks.py": 19,
    "tests/journeys/test_live_chats.py": 7, "tests/journeys/test_matrix.py": 8,
    "tests/journeys/test_operator_day.py": 11, "tests/journeys/test_people.py": 12,
    "tests/journeys/test_replay.py": 16, "tests/journeys/test_rpa_operations.py": 40,
    "tests/journeys/test_take_over.py": 15, "tests/journeys/test_webhooks.py": 10,
    "tests/local_stack/test_embedded_servers.py": 20, "tests/local_stack/test_stack.py": 19,
    "tests/rpa_tasks/browsers/test_concurrency.py": 14, "tests/rpa_tasks/browsers/test_maintainer.py": 32,
    "tests/rpa_tasks/browsers/test_take_over.py": 14, "tests/rpa_tasks/browsers/test_take_over_files.py": 8,
    "tests/rpa_tasks/browsers/test_upkeep.py": 34, "tests/rpa_tasks/flow/test_browser.py": 7,
    "tests/rpa_tasks/isolation/test_start.py": 8, "tests/rpa_tasks/supervisor/test_command_end.py": 9,
    "tests/scheduling/admin/test_read_replica.py": 26, "tests/scheduling/api/test_outages.py": 20,
    "tests/scheduling/metrics/test_worker_reports.py": 48, "tests/security/test_incomplete_requests.py": 10,
    "tests/security/test_tls.py": 47, "tests/sessions/test_cluster.py": 14,
    "tests/sessions/websocket/test_chat_page.py": 52,
}  # fmt: skip

#: Files whose tests share what each process would start for itself: one process runs those of a line.
TOGETHER = {
    "web": (
        "tests/rpa_tasks/api/", "tests/scheduling/api/", "tests/security/test_api_scopes.py",
        "tests/security/test_entry_points.py", "tests/security/test_page_headers.py", "tests/sessions/websocket/",
    ),
    "cluster": (
        "tests/sessions/test_cluster.py", "tests/sessions/test_state_machine.py", "tests/sessions/test_stats.py",
    ),
}  # fmt: skip


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means: two a core, because tests wait for half of their time. One more than cores for
    `make processes`, whose programs use the others. None for tests picked by hand, or where all would share one Redis.
    """
    picked = config.option.keyword or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if picked or environment().redis_url:
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores + 1 if config.option.markexpr == "processes" else 2 * cores, MOST)


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
    groups: dict[str, list[str]] = {}
    for path in sorted(tests):
        name = next((name for name, paths in TOGETHER.items() if path.startswith(paths)), path)
        groups.setdefault(name, []).append(path)
    seconds = {
        name: sum(SECONDS.get(path, tests[path] * SECONDS_A_TEST) for path in paths) for name, paths in groups.items()
    }
    loads = [0.0] * processes
    shares = {}
    for name in sorted(groups, key=lambda name: (-seconds[name], name)):
        process = loads.index(min(loads))
        loads[process] += seconds[name]
        shares |= dict.fromkeys(groups[name], process)
    return shares
