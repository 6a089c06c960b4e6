"""Celery's way in. Each task only calls the domain."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import redis
from celery import shared_task
from django.db import InterfaceError, OperationalError

from scheduling import absence, delivery, dispatcher, retention
from scheduling.what_if import runs

#: What passes by itself. Everything else is a fault of the work, not of the house.
INFRASTRUCTURE = (OperationalError, InterfaceError, redis.ConnectionError, redis.TimeoutError)
PATIENCE: dict[str, Any] = {
    "autoretry_for": INFRASTRUCTURE,
    "retry_backoff": 1,
    "retry_backoff_max": 15,
    "max_retries": 5,
}


@shared_task(name="scheduling.deliver", **PATIENCE)
def deliver(task_ids: list[str]) -> None:
    delivery.deliver([UUID(task_id) for task_id in task_ids])


@shared_task(name="scheduling.hand_over", is_tick=True)
def hand_over() -> None:
    dispatcher.hand_over_due()


@shared_task(name="scheduling.rescue", is_tick=True)
def rescue() -> None:
    if any(dispatcher.rescue()):
        dispatcher.hand_over_due()  # what was lost has waited long enough


@shared_task(name="scheduling.scan_inactive", is_tick=True)
def scan_inactive() -> None:
    absence.scan()


@shared_task(name="scheduling.forget", is_tick=True)
def forget() -> None:
    retention.forget()


@shared_task(name="scheduling.what_if", is_tick=True)
def what_if() -> None:
    runs.execute_next()
