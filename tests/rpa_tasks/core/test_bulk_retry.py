"""Many jobs are published again in one transaction, while others publish the same keys, without a deadlock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from django.db import connection

from config.local.processes import wait_until
from rpa_tasks.jobs import dead_letters
from rpa_tasks.jobs.schedules import publish_round
from rpa_tasks.models import Job
from scheduling import sql
from scheduling.models import FailedTask
from scheduling.operations import bulk_actions, failed_tasks
from scheduling.operations.failed_tasks import Actor, Retry
from tests.rpa_tasks.core.conftest import Market
from tests.scheduling.core.conftest import LATER

pytestmark = pytest.mark.django_db(transaction=True)
ANN = Actor("ann")
WAIT_LIMIT = 20


@pytest.fixture
def create_failed_jobs(market: Market) -> Callable[..., None]:
    """A job of each of these shops that failed, for this reason, one after the other."""

    def create_failed_jobs(shops: Sequence[str], reason: str) -> None:
        for shop_id in shops:
            market.end(market.publish(shop_id).task_id, reason=reason)

    return create_failed_jobs


def lock_is_awaited() -> bool:
    ((found,),) = sql.rows("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)", {})
    return bool(found)


class PublishBarrier:
    """Stop each publisher after its first job until another one has published, waits or has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: set[int] = set()
        self.through = threading.Event()
        republisher = dead_letters.REPUBLISHER

        def publish(row: FailedTask, retry: Retry) -> Mapping[str, Any] | None:
            edited = republisher.publish(row, retry)
            me = threading.get_ident()
            if me not in self.published:
                self.published.add(me)
                wait_until(lambda: len(self.published) > 1 or lock_is_awaited() or self.through.is_set(), WAIT_LIMIT)
            return edited

        slowed = replace(republisher, publish=publish)
        monkeypatch.setattr(failed_tasks, "find_republisher", lambda _origin: slowed)

    def run(self, *acts: Callable[[], Any]) -> list[Any]:
        def run(act: Callable[[], Any]) -> Any:
            try:
                return act()
            finally:
                self.through.set()
                connection.close()

        with ThreadPoolExecutor(len(acts)) as pool:
            return [each.result(180) for each in [pool.submit(run, act) for act in acts]]


def test_concurrent_bulk_retries_of_same_keys_do_not_deadlock(
    market: Market, create_failed_jobs: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an order each held the key that the other inserts next: a deadlock, and one batch was undone."""
    market.flow()
    for shop_id in ("s1", "s2"):
        market.shop(shop_id)
    create_failed_jobs(["s2", "s1"], "here")
    create_failed_jobs(["s1", "s2"], "there")
    rows = [bulk_actions.start_bulk_action("retry", {"reason": reason}, ANN) for reason in ("here", "there")]

    PublishBarrier(monkeypatch).run(*(lambda row=row: bulk_actions.run_batch(row.pk, LATER) for row in rows))

    for row in rows:
        row.refresh_from_db()
    assert [row.tries for row in rows] == [0, 0]
    assert sorted((row.done, row.skipped, row.failed) for row in rows) == [(0, 2, 0), (2, 0, 0)]
    assert sorted(Job.objects.filter(state="scheduled").values_list("shop__shop_id", flat=True)) == ["s1", "s2"]


def test_bulk_retry_and_round_of_same_shops_do_not_deadlock(
    market: Market, create_failed_jobs: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    market.flow()
    for shop_id in ("s1", "s2"):
        market.shop(shop_id)
    create_failed_jobs(["s2", "s1"], "here")
    row = bulk_actions.start_bulk_action("retry", {"reason": "here"}, ANN)
    meeting = PublishBarrier(monkeypatch)

    def tick() -> Any:
        wait_until(lambda: bool(meeting.published), WAIT_LIMIT)
        return publish_round(1, sql.now(), [], {"platform": "pdd", "task_type": "sync_order"})

    _, told = meeting.run(lambda: bulk_actions.run_batch(row.pk, LATER), tick)

    row.refresh_from_db()
    assert (row.tries, row.done, row.skipped) == (0, 2, 0)
    assert (told.published, told.waiting) == (0, 2)
