"""Celery tasks of the RPA part. Each only calls the domain."""

from __future__ import annotations

from typing import Any

from celery import current_app, shared_task

from rpa_tasks.jobs import dispatch, schedules
from rpa_tasks.worker import runner
from scheduling import sql


@shared_task(name="rpa_tasks.publish_for_shops")
def publish_for_shops(*given: Any, **order: Any) -> None:
    """Publish a round now. Beat does not send this message, it publishes the rounds of stored schedules itself.

    It is tried once: the round's instant is that of the try, so a second try would be a second round. A failure becomes
    a failed task. Look at the jobs before you send it again.
    """
    schedules.publish_round(0, sql.now(), given, order)


@shared_task(name="rpa_tasks.run", is_tick=True)
def run_jobs() -> None:
    """Run startable jobs. The message carries no job; the work is in PostgreSQL."""
    runner.run_startable_jobs(list(current_app.amqp.queues.consume_from))


@shared_task(name="rpa_tasks.dispatch_due", is_tick=True)
def dispatch_due() -> None:
    dispatch.dispatch_due_jobs()


@shared_task(name="rpa_tasks.rescue", is_tick=True)
def rescue_runs() -> None:
    dispatch.run_repair_passes()
