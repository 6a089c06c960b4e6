"""Which workers are elastic, and how long a message has waited for a process of one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from config.celery.autoscaler import ScalingWorker, _waited_seconds
from config.celery.queues import CORE_QUEUES, RPA_QUEUES

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def bounds(settings: Any, queues: str, **options: Any) -> Any:
    """What a worker of these queues is given as its autoscale option."""
    settings.AFTERTOUCH_WORKER_MIN, settings.AFTERTOUCH_WORKER_MAX = 2, 6
    worker: Any = SimpleNamespace(pool_cls="prefork")
    return ScalingWorker.prepare_args(worker, queues=queues, **options).get("autoscale")


@pytest.mark.parametrize("queues", [",".join(CORE_QUEUES), CORE_QUEUES[0]])
def test_core_worker_autoscale_uses_settings(settings: Any, queues: str) -> None:
    assert bounds(settings, queues) == [6, 2]


@pytest.mark.parametrize("queues", ["", RPA_QUEUES[0], f"{CORE_QUEUES[0]},{RPA_QUEUES[0]}"])
def test_autoscale_of_other_worker_is_unset(settings: Any, queues: str) -> None:
    """A run needs a browser: more processes would not find one."""
    assert bounds(settings, queues) is None


def test_autoscale_option_of_command_line_overrides_settings(settings: Any) -> None:
    assert bounds(settings, CORE_QUEUES[0], autoscale=[9, 3]) == [9, 3]


@pytest.mark.parametrize(
    ("published", "eta", "expected"),
    [(10, None, 10.0), (60, 5, 5.0), (10, 20, 10.0), (60, -5, 0.0), (-5, None, 0.0), (None, 5, 0.0)],
    ids=["due when published", "waited for its eta", "overdue when published", "not due", "clock ahead", "a tick"],
)
def test_waited_seconds_count_from_ready_time(published: float | None, eta: float | None, expected: float) -> None:
    """Both are seconds before now."""
    request = SimpleNamespace(
        request_dict={} if published is None else {"published_at": NOW.timestamp() - published},
        eta=None if eta is None else NOW - timedelta(seconds=eta),
    )
    assert _waited_seconds(request, NOW) == expected
