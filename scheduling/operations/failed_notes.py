"""Assign failed tasks to users, and comment on them. Neither changes the state."""

from __future__ import annotations

from uuid import UUID

from django.contrib.auth.models import User
from django.db import transaction

from scheduling.error_text import ErrorText as _
from scheduling.errors import InvalidInput, NotFound
from scheduling.models import FailedTask, FailedTaskComment
from scheduling.operations.failed_tasks import Actor

MAX_COMMENT = 2_000  #: characters
MOST_COMMENTS = 200  #: per failed task


def list_assignable_users() -> list[User]:
    """Return the active users of the back office, by name."""
    return list(User.objects.filter(is_active=True, is_staff=True).order_by("username"))


def assign_failed_task(failed_id: UUID, username: str | None) -> None:
    """Assign a failed task to a user of the back office; None removes the assignee. Idempotent.

    Raises:
        InvalidInput: `user` names no active user of the back office.
        NotFound: there is no such failed task.
    """
    user = None
    if username is not None:
        user = User.objects.filter(username=username, is_active=True, is_staff=True).first()
        if user is None:
            raise InvalidInput.of(
                "user", _("there is no active user “%(name)s” of the back office", name=username[:150])
            )
    if not FailedTask.objects.filter(pk=failed_id).update(assignee=user):
        raise NotFound(_("There is no failed task %(failed_id)s.", failed_id=failed_id))


def add_comment(failed_id: UUID, text: str, actor: Actor) -> FailedTaskComment:
    """Store a comment. It waits for an erasure or retention that holds the failed task.

    Raises:
        InvalidInput: `text` is empty or too long, or the task has `MOST_COMMENTS` comments.
        NotFound: there is no such failed task.
    """
    text = text.strip()
    if not text or len(text) > MAX_COMMENT:
        raise InvalidInput.of("text", _("must have 1 to %(most)s characters", most=MAX_COMMENT))
    with transaction.atomic():
        row = FailedTask.objects.select_for_update().filter(pk=failed_id).first()
        if row is None:
            raise NotFound(_("There is no failed task %(failed_id)s.", failed_id=failed_id))
        if row.comments.count() >= MOST_COMMENTS:
            raise InvalidInput.of("text", _("The failed task has %(most)s comments already.", most=MOST_COMMENTS))
        return FailedTaskComment.objects.create(
            failed_task=row, author=actor.user, author_name=actor.name[:150], text=text
        )
