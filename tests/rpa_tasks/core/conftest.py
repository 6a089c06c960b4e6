"""Shops, flows and racing threads."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import pytest

from rpa_tasks.jobs import wakeups
from rpa_tasks.jobs.ledger import Pick, jobs
from rpa_tasks.jobs.publish import PublishRequest, Receipt, publish_job
from rpa_tasks.models import Flow, Platform, Shop

Answer = TypeVar("Answer")
WAIT_LIMIT = 60  #: seconds
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

    def pick(self, *queues: str, node: str = "n1", ageing: timedelta = timedelta(minutes=10)) -> Pick | None:
        return jobs.pick(queues or EVERY, node=node, lease=timedelta(seconds=60), ageing=ageing)


@pytest.fixture
def market(db: None) -> Market:
    return Market()


@pytest.fixture(autouse=True)
def sent_wakeups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the wake-ups; nothing is published."""
    published: list[Any] = []
    monkeypatch.setattr(wakeups.wakeup_publisher, "submit", published.extend)
    return published
