"""A task whose infrastructure is unavailable is retried with growing delays, and succeeds after the outage."""

import pytest
from celery.signals import task_prerun, task_retry
from django.db import OperationalError, connection

from scheduling import tasks
from scheduling.delivery.sender import sender
from scheduling.models import FailedTask, Touch
from tests.scheduling.core.conftest import fall_due
from tests.support.waiting import WAIT_LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


class Outage:
    """Make PostgreSQL unavailable for this thread until the given try. Return the delays of the retries."""

    def __init__(self):
        self.back_at = 0  #: 0: it never comes back
        self.put_off = {}  #: seconds, by the tries before
        self.settings = connection.settings_dict
        self.begin()

    def begin(self):
        connection.close()
        connection.settings_dict = self.settings | {"PORT": "1"}  # no server listens there; other threads continue

    def end(self, **_):
        connection.close()
        connection.settings_dict = self.settings

    def next_try(self, task, **_):
        if self.back_at and task.request.retries == self.back_at:
            self.end()

    def note(self, request, reason, **_):
        self.put_off[request.retries] = reason.when


@pytest.fixture
def touch(matrix, record_event):
    matrix.node()
    (task_id,) = record_event().task_ids
    fall_due(task_id)
    return Touch.objects.get(pk=task_id)


@pytest.fixture
def outage(touch, monkeypatch):
    """With the longest of the pauses that chance may choose: each is at most that."""
    monkeypatch.setattr("celery.utils.time.random.randrange", lambda end: end - 1)
    outage = Outage()
    task_prerun.connect(outage.next_try, weak=False)
    task_retry.connect(outage.note, weak=False)
    yield outage
    task_prerun.disconnect(outage.next_try)
    task_retry.disconnect(outage.note)
    outage.end()


def run_task(touch):
    """Run the task as a worker does, until what it sends is settled."""
    result = tasks.deliver.apply([[str(touch.task_id)]])
    assert sender().drain(WAIT_LIMIT)
    return result


def test_task_backs_off_and_leaves_its_touch_for_the_time_after_the_outage(touch, outage):
    result = run_task(touch)
    assert outage.put_off == {0: 1, 1: 2, 2: 4, 3: 8, 4: 15}
    assert isinstance(result.result, OperationalError)
    outage.end()
    before = touch.state
    touch.refresh_from_db()
    assert (touch.state, touch.attempt, FailedTask.objects.count()) == (before, 0, 0)

    outage.put_off.clear()
    outage.begin()
    outage.back_at = 3
    run_task(touch)
    assert outage.put_off == {0: 1, 1: 2, 2: 4}
    touch.refresh_from_db()
    assert (touch.state, touch.attempt) == ("delivered", 1)


def test_task_with_own_error_is_not_retried(touch, outage, monkeypatch):
    outage.end()

    def broken(_):
        raise ValueError

    monkeypatch.setattr("scheduling.delivery.pipeline.deliver_touches", broken)
    assert not run_task(touch).successful()
    assert outage.put_off == {}
