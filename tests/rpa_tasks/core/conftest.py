"""A market: shops, flows, jobs and execution nodes, and what happens to them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.utils.timezone import now

from rpa_tasks.jobs.dead_letters import record_failed_job
from rpa_tasks.jobs.dispatch import RunResult, settle_run
from rpa_tasks.jobs.ledger import Pick, job_ledger
from rpa_tasks.jobs.publish import PublishRequest, Receipt, publish_job
from rpa_tasks.models import ExecutionNode, Flow, Job, Platform, Shop
from rpa_tasks.outcomes import RunOutcome, Verdict
from scheduling import sql
from scheduling.models import FailedTask

EVERY = ("high", "normal", "low")


class Market:
    """Builds what a test needs and plays its parts."""

    def platform(self, key: str = "pdd", **changes: Any) -> Platform:
        return Platform.objects.filter(key=key).first() or Platform.objects.create(key=key, **changes)

    def shop(self, shop_id: str = "s1", platform: str = "pdd", **changes: Any) -> Shop:
        return Shop.objects.create(platform=self.platform(platform), shop_id=shop_id, **changes)

    def flow(self, task_type: str = "sync_order", platform: str = "pdd", **changes: Any) -> Flow:
        changes = {"command": ["true", "{param}"], "needs_browser": False, "idempotent": True} | changes
        return Flow.objects.create(platform=self.platform(platform), task_type=task_type, **changes)

    def publish(self, shop_id: str = "s1", task_type: str = "sync_order", **changes: Any) -> Receipt:
        platform = changes.pop("platform", "pdd")
        return publish_job(PublishRequest(platform=platform, shop_id=shop_id, task_type=task_type, **changes))

    def pick(self, *queues: str, node: str = "n1") -> Pick | None:
        return job_ledger.pick(queues or EVERY, node=node, lease=timedelta(seconds=60))

    def node(self, name: str = "n1", *queues: str, slots: int = 2, **changes: Any) -> ExecutionNode:
        """Report an execution node. Without other words it serves all shared queues."""
        seen = {"seen_at": now(), "started_at": now(), "slots": slots, "queues": list(queues or EVERY)}
        return ExecutionNode.objects.create(**{"name": name} | seen | changes)

    def settle(self, pick: Pick, outcome: str = "succeeded", reason: str = "", **found: Any) -> bool:
        """Write the end of a run. Return whether its claim was valid."""
        job = Job.objects.select_related("shop__platform", "flow").get(pk=pick.claim.task_id)
        given: dict[str, Any] = {"verdict": Verdict(RunOutcome(outcome), reason), "started_at": sql.now()}
        return settle_run(job, pick.claim, RunResult(**given | found))

    def end(self, task_id: UUID, state: str = "failed", reason: str = "exit_65") -> FailedTask | None:
        """End a job without a run. Return its failed task, if it has one."""
        ended = {"state": state, "reason": reason, "settled_at": now(), "lease_until": None, "fresh": False}
        Job.objects.filter(pk=task_id).update(attempt=1, **ended)
        if state in ("failed", "unknown"):
            record_failed_job(task_id)
        return FailedTask.objects.filter(task_id=task_id).first()


@pytest.fixture
def market(db) -> Market:
    return Market()


@pytest.fixture(autouse=True)
def _no_message(sent_wakeups) -> None:
    """Nothing is published."""
