"""Define the Celery tasks of outreach. Each task only calls the domain."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import structlog
from celery import shared_task

from scheduling import dispatch, sql, webhooks
from scheduling.configuration import snapshot
from scheduling.customers import erasure, imports
from scheduling.delivery import pipeline
from scheduling.dispatch import publication_headers
from scheduling.experiments import drafts, rollouts
from scheduling.identity.sign_ins import SessionStore
from scheduling.operations import bulk_actions, retention
from scheduling.planning import own_events
from scheduling.redis_client import UNREACHABLE_ERRORS
from scheduling.webhooks import outbox_sender

log = structlog.get_logger(__name__)

#: Errors that end without a change. Every other error is a defect of the work.
INFRASTRUCTURE = (*sql.UNAVAILABLE_ERRORS, *UNREACHABLE_ERRORS)
RETRY_OPTIONS: dict[str, Any] = {
    "autoretry_for": INFRASTRUCTURE,
    "retry_backoff": 1,
    "retry_backoff_max": 15,
    "max_retries": 5,
}


@shared_task(name="scheduling.deliver", **RETRY_OPTIONS)
def deliver(task_ids: list[str]) -> None:
    pipeline.deliver_touches([UUID(task_id) for task_id in task_ids])


# Passes that are one call of the domain.
dispatch_due = shared_task(name="scheduling.dispatch_due", is_tick=True)(dispatch.dispatch_due_touches)
scan_inactive = shared_task(name="scheduling.scan_inactive", is_tick=True)(own_events.scan_inactive_customers)
follow_touches = shared_task(name="scheduling.follow_touches", is_tick=True)(own_events.record_ends)
erase_customers = shared_task(name="scheduling.erase_customers", is_tick=True)(erasure.continue_erasures)
advance_rollouts = shared_task(name="scheduling.advance_rollouts", is_tick=True)(rollouts.advance_rollouts)
run_next_replay = shared_task(name="scheduling.run_replay", is_tick=True)(drafts.run_next_replay)
continue_bulk_actions = shared_task(name="scheduling.continue_bulk_actions", is_tick=True)(
    bulk_actions.continue_bulk_actions
)
continue_imports = shared_task(name="scheduling.continue_imports", is_tick=True)(imports.continue_imports)


@shared_task(name="scheduling.rescue", is_tick=True)
def rescue() -> None:
    dispatch.resume_unpaused()
    if any(dispatch.rescue_lost_work()):
        dispatch.dispatch_waiting_touches()  # touches with a lost wake-up have waited long enough


@shared_task(name="scheduling.delete_expired", is_tick=True)
def delete_expired_data() -> None:
    retention.delete_expired_rows()
    imports.discard_stale_imports()
    SessionStore.clear_expired()
    webhooks.delete_old_messages()


@shared_task(name="scheduling.request_webhooks", is_tick=True)
def request_webhooks() -> None:
    """Wake the sender of one worker of touches. Its thread runs on, so a further message costs nothing."""
    if not snapshot.current().webhooks:
        webhooks.forget_events()
        return
    try:
        send_webhooks.apply_async(
            queue="touch.low", headers=publication_headers() | {"periodic_task_name": request_webhooks.name}
        )
    except Exception as error:  # any error of the broker's client; the next pass publishes again
        log.warning("webhooks_not_requested", error=str(error))


@shared_task(name="scheduling.send_webhooks", is_tick=True)
def send_webhooks() -> None:
    outbox_sender().wake()
