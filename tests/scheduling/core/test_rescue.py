"""How fast it is found again when everything was lost at once."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis
import time_machine
from django.utils.timezone import now

from scheduling import dispatch
from scheduling.models import Touch
from tests.scheduling.core.conftest import expire_lease
from tests.support.matrix import MatrixBuilder, RecordEvent

pytestmark = pytest.mark.django_db(transaction=True)


def test_rescue_returns_everything_in_one_pass(
    matrix: MatrixBuilder, record_event: RecordEvent, valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand a tick is 200 a second: less than what falls due in that time."""
    monkeypatch.setattr(dispatch, "PASS_LIMIT", 2)
    matrix.node()
    waiting = [record_event(user=f"user-{number}").task_ids[0] for number in range(7)]
    Touch.objects.update(state="queued", queued_at=now(), lease_until=now())
    expire_lease(*waiting)
    assert dispatch.rescue_lost_work() == (7, 0)
    assert set(Touch.objects.values_list("state", flat=True)) == {"scheduled"}

    Touch.objects.update(state="running", lease_no=1, lease_until=now())
    expire_lease(*waiting)
    assert dispatch.rescue_lost_work() == (0, 7)
    assert set(Touch.objects.values_list("state", flat=True)) == {"scheduled"}


def test_rescue_uses_database_time_for_lost_run(
    matrix: MatrixBuilder, record_event: RecordEvent, valkey: redis.Redis
) -> None:
    """By the clock of a node that is ahead it would wait for as long."""
    matrix.node()
    (task_id,) = record_event().task_ids
    Touch.objects.update(state="running", lease_no=1, lease_until=now())
    expire_lease(task_id)
    with time_machine.travel(now() + timedelta(hours=1), tick=True):
        assert dispatch.rescue_lost_work() == (0, 1)
    assert Touch.objects.get().due_at <= now()
