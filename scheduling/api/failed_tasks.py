"""List failed tasks and act on them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Query, Router

from scheduling import sql
from scheduling.api.auth import ApiKeyAuth, build_api_key_actor, require_scope
from scheduling.api.schemas import (
    ActionIn,
    AssignIn,
    CommentIn,
    FailedTaskOut,
    FailedTasksOut,
    Page,
    ProblemOut,
    ResolveIn,
    RetryIn,
    Text,
    build_page,
    limit_list_time,
)
from scheduling.errors import InvalidInput
from scheduling.models import FailedTask, Scope
from scheduling.operations import failed_tasks, queries

router = Router(tags=["failed tasks"], auth=ApiKeyAuth("failed-tasks"))
PROBLEMS = (400, 401, 403, 404, 409, 413, 422, 429, 503)


class FailedTaskFilters(Page):
    state: FailedTask.State | None = None
    reason: Text = ""
    fingerprint: Text = ""
    origin: FailedTask.Origin | None = None
    channel: Text = ""
    q: Text = ""


@router.get("/failed-tasks", response={200: FailedTasksOut, PROBLEMS: ProblemOut})
def list_failed_tasks(request: HttpRequest, filters: Query[FailedTaskFilters]) -> dict[str, Any]:
    """List failed tasks, newest first. `q` is a full id (of the task, its event, trace, user, shop or chat), or words
    of the detail among the latest 50,000. A list that takes too long returns 503."""
    with limit_list_time():
        equal = filters.model_dump(exclude={"limit", "cursor", "q"}, exclude_none=True)
        found = queries.filter_failed_tasks(filters.q, **equal)
        if before := filters.before():
            found = found.filter(pk__lt=before)
        rows = list(queries.prefetch_notes(found).order_by("-pk")[: filters.limit + 1])
        return build_page(rows, [row.id for row in rows], filters.limit)


@router.post("/failed-tasks/{failed_id}/retry", response={200: FailedTaskOut, PROBLEMS: ProblemOut})
def retry(request: HttpRequest, failed_id: UUID, wish: RetryIn) -> FailedTask:
    """Publish a failed task again with the same delivery key, as `retried_as`. `as_new` uses a new delivery key. It
    may deliver a message twice, so it needs `confirm: true`. `payload` replaces what is published: the payload of a
    job, or `subject` and `body` of a touch. An edited task gets a new delivery key. Its failed task keeps the
    `difference`. It needs the scope `failed-tasks.edit` too. After an unknown outcome `payload` needs `as_new`."""
    if wish.payload is not None:
        require_scope(request, Scope.FAILED_TASKS_EDIT.value)
    if wish.as_new and not wish.confirm:
        raise InvalidInput.of("confirm", "sending again as new may deliver it twice; confirm with true")
    with sql.brief_lock_waits():
        failed_tasks.retry_failed_task(
            failed_id, build_api_key_actor(request, wish.reason), as_new=wish.as_new, payload=wish.payload
        )
    return _read_failed_task(failed_id)


@router.post("/failed-tasks/{failed_id}/resolve", response={200: FailedTaskOut, PROBLEMS: ProblemOut})
def resolve(request: HttpRequest, failed_id: UUID, wish: ResolveIn) -> FailedTask:
    """Record whether a task with an unknown outcome was delivered."""
    with sql.brief_lock_waits():
        failed_tasks.resolve_failed_task(failed_id, build_api_key_actor(request, wish.reason), delivered=wish.delivered)
    return _read_failed_task(failed_id)


@router.post("/failed-tasks/{failed_id}/ignore", response={200: FailedTaskOut, PROBLEMS: ProblemOut})
def ignore(request: HttpRequest, failed_id: UUID, wish: ActionIn) -> FailedTask:
    """Ignore a failed task. A retry stays possible."""
    with sql.brief_lock_waits():
        failed_tasks.ignore_failed_task(failed_id, build_api_key_actor(request, wish.reason))
    return _read_failed_task(failed_id)


@router.post("/failed-tasks/{failed_id}/archive", response={200: FailedTaskOut, PROBLEMS: ProblemOut})
def archive(request: HttpRequest, failed_id: UUID, wish: ActionIn) -> FailedTask:
    """Archive a failed task. This is final."""
    with sql.brief_lock_waits():
        failed_tasks.archive_failed_task(failed_id, build_api_key_actor(request, wish.reason))
    return _read_failed_task(failed_id)


@router.post("/failed-tasks/{failed_id}/comments", response={200: FailedTaskOut, PROBLEMS: ProblemOut})
def comment(request: HttpRequest, failed_id: UUID, wish: CommentIn) -> FailedTask:
    """Add a comment to a failed task. Its state stays."""
    with sql.brief_lock_waits():
        failed_tasks.add_comment(failed_id, wish.text, build_api_key_actor(request))
    return _read_failed_task(failed_id)


@router.post("/failed-tasks/{failed_id}/assign", response={200: FailedTaskOut, PROBLEMS: ProblemOut})
def assign(request: HttpRequest, failed_id: UUID, wish: AssignIn) -> FailedTask:
    """Assign a failed task to a user of the back office by user name. null removes the assignee."""
    with sql.brief_lock_waits():
        failed_tasks.assign_failed_task(failed_id, wish.user, build_api_key_actor(request))
    return _read_failed_task(failed_id)


def _read_failed_task(failed_id: UUID) -> FailedTask:
    return queries.prefetch_notes(FailedTask.objects.all()).get(pk=failed_id)
