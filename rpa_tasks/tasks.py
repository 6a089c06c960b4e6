"""Celery tasks of the RPA part. Each only calls the domain."""

from __future__ import annotations

from typing import Any

from celery import current_app, shared_task

from rpa_tasks.jobs import dispatch, scheduled_rounds, schedules
from rpa_tasks.worker import runner
from scheduling.tasks import PATIENCE


@shared_task(name="rpa_tasks.publish_for_shops", **PATIENCE)
def publish_for_shops(*given: Any, **order: Any) -> None:
    """Accept any arguments: invalid ones must become a failed task, not only an entry in beat's log."""
    schedules.publish_for_shops(schedules.by_name(given, order))


@shared_task(name="rpa_tasks.run", is_tick=True)
def run() -> None:
    """Run startable jobs. The message carries no job; the work is in PostgreSQL."""
    runner.work(list(current_app.amqp.queues.consume_from))


@shared_task(name="rpa_tasks.hand_over", is_tick=True)
def hand_over() -> None:
    dispatch.hand_over_due()


@shared_task(name="rpa_tasks.keep_moving", is_tick=True)
def keep_moving() -> None:
    dispatch.keep_moving()
    scheduled_rounds.run_waiting()  # rounds whose message was lost or whose worker vanished


@shared_task(name="rpa_tasks.run_rounds", is_tick=True)
def run_rounds() -> None:
    """Publish stored rounds. The message carries no round."""
    scheduled_rounds.run_waiting()
