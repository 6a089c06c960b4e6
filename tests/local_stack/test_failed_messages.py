"""Which failed messages become failed tasks: those that come back by no schedule and no retry."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError

from scheduling.models import FailedTask
from scheduling.tasks import deliver, dispatch_due


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("task", "error", "kept"),
    [
        (deliver, ValueError("odd"), ["ValueError: odd"]),
        (deliver, OperationalError("the server is starting up"), []),
        (dispatch_due, ValueError("odd"), []),
    ],
    ids=["a defect", "retried", "a tick"],
)
def test_on_failure_records_only_tasks_without_retry(task: Any, error: Exception, kept: list[str]) -> None:
    task.on_failure(error, "id", [["t1"]], {}, None)
    rows = FailedTask.objects.filter(origin="message", reason="task_error")
    assert [row.detail for row in rows] == kept
