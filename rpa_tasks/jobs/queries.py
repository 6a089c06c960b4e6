"""Filters of jobs, the backlogs of platforms, and the bulk actions on listed jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Count, Q, TextField
from django.db.models.functions import Cast
from django.utils.translation import gettext_lazy, ngettext_lazy

from rpa_tasks.jobs import publish, shops
from rpa_tasks.jobs.dead_letters import sort_in_lock_order
from rpa_tasks.jobs.payloads import refuse_erased_job, requested_key_of
from rpa_tasks.jobs.wakeups import queue_of, wakeup_publisher
from rpa_tasks.models import CANCEL_JOBS, RUN_JOBS, ExecutionNode, Flow, Job, Shop
from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, InvalidInput, NotFound
from scheduling.ids import parse_uuid
from scheduling.ledger.transitions import WakeUp
from scheduling.models import WAITING, FailedTask, Priority, Scope
from scheduling.operations import failed_tasks
from scheduling.operations.bulk_actions import RETRY_RATE, Given, RowAction, refuse_parameters
from scheduling.operations.failed_tasks import Actor


def filter_jobs(platform: str = "", shop: str = "", task_type: str = "", **equal: Any) -> Q:
    """Filter by the ids of shops and flows, which use an index, and by equal columns. "" and None match any value."""
    wanted = Q(**{name: value for name, value in equal.items() if value not in ("", None)})
    if platform or shop:
        named = {"platform__key": platform, "shop_id": shop}
        found = Shop.objects.filter(**{name: value for name, value in named.items() if value})
        wanted &= Q(shop_id__in=list(found.values_list("pk", flat=True)))
    if task_type:
        wanted &= Q(flow_id__in=list(Flow.objects.filter(task_type=task_type).values_list("pk", flat=True)))
    return wanted


def count_platform_backlogs() -> dict[int, int]:
    """Count the waiting jobs that count against the backlog limit of each platform that has some, by its id."""
    waiting = Job.objects.filter(state__in=WAITING)
    return dict(waiting.values_list("shop__platform").annotate(count=Count("*")).order_by())


UNFINISHED = (*WAITING, "running")
SEARCHED = 20_000  #: latest jobs whose payloads a search reads


def filter_job_status(value: str, at: datetime) -> Q:
    """Filter jobs that could start at this time if a slot were free, or whose due date has passed; all for "".

    No job has an unknown status.
    """
    meant = {
        "": Q(),
        "due": Q(state__in=WAITING, due_at__lte=at),  # a dispatched job may start only at its time
        "late": Q(state__in=UNFINISHED, deadline__lt=at),
    }
    return meant.get(value, Q(pk__in=()))


def filter_jobs_by_key(value: str) -> Q:
    """Find complete ids and keys only."""
    term = value.strip()
    if not term:
        return Q()
    found = Q(shop__shop_id=term) | Q(dedupe_key=term)
    if uuid := parse_uuid(term):
        found |= Q(pk=uuid) | Q(root_id=uuid) | Q(touch_key=uuid)
    return found


def filter_jobs_by_words(value: str) -> Q:
    """Find complete ids and keys, or words of the payloads of the latest `SEARCHED` jobs.

    For requesters who may read payloads: with it another one could find a hidden value letter by letter.
    """
    term = value.strip()
    if not term:
        return Q()
    read = Job.objects.filter(pk__in=Job.objects.order_by("-pk").values("pk")[:SEARCHED])
    with_words = read.annotate(text=Cast("payload", TextField())).filter(text__icontains=term)
    return filter_jobs_by_key(term) | Q(pk__in=with_words.values("pk"))


# Define the bulk actions on jobs: cancel, run again, change the priority, move to another node.
#
# A batch holds the locks of many rows. Cancelling, changing the priority and moving skip rows that another transaction
# has locked. Running again waits for locks in the order of all publishers.


#: The parameter of `job.run_again` by a user or key without the right to handle failed tasks.
LEAVES_FAILED_TASKS = {"leaves_failed_tasks": True}
ENDED = ("succeeded", "failed", "unknown", "cancelled")


def cancel_matching_job(task_id: UUID, actor: Actor) -> None:
    publish.request_cancel(task_id, by=actor.name, wait=False)


@transaction.atomic
def run_job_again(task_id: UUID, actor: Actor, *, due_at: datetime, leaves_failed_tasks: bool = False) -> None:
    """Publish an ended job again, due at `due_at`. An open failed task is retried, so that it is settled.

    With `leaves_failed_tasks` it stays open: the user who started the action may not handle failed tasks.

    Raises: `Conflict` if a job with the same key waits, its window has not ended, or an erasure emptied the job.
    """
    failed_id = _open_failed_tasks([task_id]).values_list("pk", flat=True).first()
    if failed_id and not leaves_failed_tasks:
        failed_tasks.retry_failed_task(failed_id, actor, due_at=due_at)
        return
    row = _get_job(task_id)
    receipt = publish.publish_job(repeat_request(row, actor.name, payload=row.payload, not_before=due_at))
    if receipt.duplicate:  # the rollback leaves a waiting job as it was
        raise Conflict(_("The job %(task_id)s covers it already.", task_id=receipt.task_id))


def repeat_request(row: Job, source: str, **changes: Any) -> publish.PublishRequest:
    """Return the request for another job of the same shop, flow and key. A key that the flow chose is chosen again.

    Raises: `Conflict` if an erasure emptied the job.
    """
    refuse_erased_job(row)
    given = {"priority": row.priority, "dedupe_key": requested_key_of(row.dedupe_key), "source": source}
    return publish.PublishRequest(row.shop.platform.key, row.shop.shop_id, row.flow.task_type, **given | changes)


def change_priority(task_id: UUID, actor: Actor, *, priority: str) -> None:
    """Change the priority of a waiting job, and wake a node in its new queue if it is due.

    Raises: `Conflict` if the job has this priority, does not wait or is locked.
    """
    wanted = Priority[priority.upper()]
    found = sql.rows(_CHANGE_PRIORITY, {"id": task_id, "priority": wanted, "horizon": settings.AFTERTOUCH_HORIZON})
    if not found:
        raise Conflict(_("The job %(task_id)s does not wait, or has this priority already.", task_id=task_id))
    ((due_at, shop, soon),) = found
    if soon:
        wakeup = WakeUp(task_id, due_at, int(wanted), shop)
        transaction.on_commit(lambda: wakeup_publisher.submit([wakeup]), robust=True)


_CHANGE_PRIORITY = """
WITH mine AS MATERIALIZED (
    SELECT task_id FROM rpa_tasks_job
    WHERE task_id = %(id)s AND COALESCE(state, '') IN ('scheduled', 'queued') AND priority <> %(priority)s
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE rpa_tasks_job AS row SET priority = %(priority)s
FROM mine WHERE row.task_id = mine.task_id
RETURNING row.due_at, row.shop_id, row.due_at <= statement_timestamp() + %(horizon)s
"""


def move_job(task_id: UUID, actor: Actor, *, node: str) -> None:
    """Let another node serve the shop of a waiting job that needs a browser. Its later jobs run there, too.

    Raises: `Conflict` if the job needs no browser or does not wait, the shop is busy, or the node cannot serve it.
    """
    row = _get_job(task_id)
    if row.state not in WAITING or not row.flow.needs_browser:
        raise Conflict(_("The job %(task_id)s does not wait for a browser.", task_id=task_id))
    shops.move_shop(row.shop, node, queue=queue_of(row.shop, row.priority), by=actor.name)


def _get_job(task_id: UUID) -> Job:
    row = Job.objects.select_related("shop__platform", "flow").filter(pk=task_id).first()
    if row is None:
        raise NotFound(_("There is no job %(task_id)s.", task_id=task_id))
    return row


def _open_failed_tasks(task_ids: Sequence[UUID]) -> Any:
    origin, state = FailedTask.Origin.RPA_JOB, FailedTask.State.OPEN
    return FailedTask.objects.filter(task_id__in=task_ids, origin=origin, state=state)


def _lock_failed_tasks_first(task_ids: Sequence[UUID]) -> Sequence[UUID]:
    """Lock the open failed tasks of these jobs before their successors are published. Return the publishing order."""
    failed_tasks.lock_in_publish_order(list(_open_failed_tasks(task_ids).values_list("pk", flat=True)))
    return sort_in_lock_order(task_ids)


def _restrict_run_again(user: User) -> Given:
    return {} if user.has_perm("scheduling.act_on_failedtask") else LEAVES_FAILED_TASKS


def _check_run_again(given: Given) -> None:
    if given != LEAVES_FAILED_TASKS:
        refuse_parameters(given)


def _check_priority(given: Given) -> None:
    _require_parameter(given, "priority")
    if given["priority"] not in {each.name.lower() for each in Priority}:
        raise InvalidInput.of("given.priority", _("high, normal or low"))


def _check_node(given: Given) -> None:
    _require_parameter(given, "node")
    if not ExecutionNode.objects.filter(name=str(given["node"])[:200]).exists():
        raise InvalidInput.of("given.node", _("there is no node “%(name)s”", name=str(given["node"])[:50]))


def _require_parameter(given: Given, wanted: str) -> None:
    if set(given) != {wanted}:
        raise InvalidInput.of("given", _("must be %(wanted)s alone", wanted=wanted))


_JOBS: dict[str, Any] = {
    "model": Job, "scope": Scope.RPA_OPERATE.value,
    "applies": ngettext_lazy("Applies to %(count)s job.", "Applies to %(count)s jobs.", "count"),
}  # fmt: skip
JOB_ACTIONS = {
    "job.cancel": RowAction(
        function=cancel_matching_job, states=UNFINISHED, permission=CANCEL_JOBS, danger=True,
        title=gettext_lazy("Cancel jobs"),
        explains=gettext_lazy(
            "A waiting job does not start. A running command gets a stop signal and is killed 15 seconds later; "
            "completed work stays."
        ),
        **_JOBS,
    ),
    "job.run_again": RowAction(
        function=run_job_again, states=ENDED, permission=RUN_JOBS, publishes=True, per_second=RETRY_RATE,
        check=_check_run_again, restrict=_restrict_run_again, lock=_lock_failed_tasks_first,
        title=gettext_lazy("Run jobs again"),
        explains=gettext_lazy(
            "Publishes a new job for each ended one with the same payload. An open failed task is retried if you may "
            "handle failed tasks, else it stays open. A job is skipped if one of its kind waits or its time window has "
            "not ended."
        ),
        warning=gettext_lazy("What a first run did may be done a second time."),
        **_JOBS,
    ),
    "job.priority": RowAction(
        function=change_priority, states=WAITING, permission=RUN_JOBS, check=_check_priority,
        title=gettext_lazy("Change the priority"),
        explains=gettext_lazy("Waiting jobs only. Nodes start jobs of a higher priority first."),
        **_JOBS,
    ),
    "job.move": RowAction(
        function=move_job, states=WAITING, permission=RUN_JOBS, check=_check_node, lock=sort_in_lock_order,
        title=gettext_lazy("Move to another node"),
        explains=gettext_lazy(
            "Moves the shops of waiting jobs, so that the node runs these and all later jobs. A shop is skipped if it "
            "is running. A job without a browser is skipped."
        ),
        warning=gettext_lazy("The login stays on the old node: platforms may ask for a login again."),
        **_JOBS,
    ),
}  # fmt: skip
