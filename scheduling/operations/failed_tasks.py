"""Handle failed tasks: publish again, resolve, ignore, archive, assign, comment.

Each action changes the row with one guarded update. Of two concurrent actions one raises `Conflict`. Assignments and
comments leave the state as it is.

An operator may edit the text of a failed touch before it is published again. The text is stored in the difference of
the failed task. `delivery.due_batch` reads it when the touch is judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models.functions import Now

from scheduling import sql
from scheduling.app_integrations import FailedTaskOrigin, integrations
from scheduling.audit import record_action
from scheduling.configuration import snapshot
from scheduling.delivery.due_batch import load_edited_texts
from scheduling.delivery.routing import find_preview_escape
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, ErrorCollector, InvalidInput, NotFound
from scheduling.ids import new_id
from scheduling.ledger.new_touches import delete_unclaimed_retry, insert_retry
from scheduling.ledger.touches import touch_ledger
from scheduling.models import FailedTask, FailedTaskComment, Touch
from scheduling.models.touch import name_in_error
from scheduling.policy.specs import EventSpec, template_for
from scheduling.strict_text import find_unstorable_text, is_same_json
from scheduling.templating import MAX_SOURCE, CannotRender, choose_text, render_message

MAX_SUBJECT = 200  #: characters, as in a template
MEMBERS = ("subject", "body")
_VARIABLE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)


def read_touch_text(row: FailedTask) -> dict[str, str] | None:
    """Return the subject and body that a retry would send; None if the touch has been deleted.

    A text that cannot be rendered is returned with its variables. An operator replaces them by words.
    """
    assert row.task_id is not None
    touch = Touch.objects.select_related("event", "node", "customer").filter(pk=str(row.task_id)).first()
    if touch is None:
        return None
    for attempt in reversed(touch.attempts):
        if attempt.body:
            return {"subject": attempt.subject, "body": attempt.body}
    return read_edited_text(touch.root_id) or _render_touch(touch)


def read_edited_text(root_id: UUID) -> dict[str, str] | None:
    """Return the edited text of a delivery key; None if no operator edited it."""
    found = load_edited_texts([root_id]).get(root_id)
    return {"subject": found.subject, "body": found.body} if found else None


def check_touch_text(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the edited subject and body.

    Raises:
        InvalidInput: a member is unknown, is no text, is too long, cannot be stored or still has a variable.
    """
    found = ErrorCollector()
    for name in sorted(set(given) - set(MEMBERS)):
        found.add(f"payload.{name}"[:100], _("is no member of a message; “subject” and “body” are"))
    text = {"subject": given.get("subject", ""), "body": given.get("body", "")}
    for name, most in (("subject", MAX_SUBJECT), ("body", MAX_SOURCE)):
        if problem := _find_problem(text[name], most):
            found.add(f"payload.{name}", problem)
    if text["body"] == "":
        found.add("payload.body", _("must be given"))
    found.raise_if_any()
    return text


def _find_problem(value: Any, most: int) -> str:
    if not isinstance(value, str):
        return _("must be a text")
    if len(value) > most:
        return _("must not be longer than %(most)s characters", most=most)
    if problem := find_unstorable_text(value):
        return problem
    variable = _VARIABLE.search(value)
    return _("still has the variable %(variable)s; write its value", variable=variable[0][:60]) if variable else ""


def _render_touch(touch: Touch) -> dict[str, str]:
    config = snapshot.current()
    template = config.templates.get(touch.template_id) if touch.template_id else None
    node = config.nodes[touch.node_id]
    if template is None:
        template = template_for(node, touch.chat_id, touch.customer.user_id, None)
    event = EventSpec(
        touch.event_id, touch.event.source, touch.event.event_id, touch.event.type, touch.event.occurred_at,
        touch.customer.user_id, touch.chat_id, touch.event.data,
    )  # fmt: skip
    customer = touch.customer.spec()
    try:
        subject, body, _locale = render_message(template, customer, event, find_preview_escape(node.channel))
    except CannotRender:
        try:
            text = choose_text(template, customer.locale)
        except CannotRender:
            return {"subject": "", "body": ""}
        subject, body = text.subject, text.body
    return {"subject": subject, "body": body}


State = FailedTask.State
RETRYABLE = (State.OPEN, State.IGNORED)
RESOLVED = (State.RESOLVED_DELIVERED, State.RESOLVED_NOT_DELIVERED)


@dataclass(frozen=True, slots=True)
class Actor:
    """The acting user and the reason, stored with the action."""

    name: str
    user: User | None = None
    reason: str = ""
    is_bulk: bool = False  #: the audit log has one entry for the bulk action, none for each row


@dataclass(frozen=True, slots=True)
class Retry:
    """What is published in place of a failed task."""

    task_id: UUID
    due_at: datetime
    as_new: bool = False  #: with a new delivery key; the receiver may get the effect twice
    payload: Mapping[str, Any] | None = None  #: edited; a receiver rejects it under the old delivery key
    priority: int | None = None  #: None: that of the original

    @property
    def renews_key(self) -> bool:
        return self.as_new or self.payload is not None


@dataclass(frozen=True, slots=True)
class Republisher:
    """Publishes failed tasks of one origin again."""

    #: Publish one task again. Return the edited payload that it gets; None: it is that of the original.
    publish: Callable[[FailedTask, Retry], Mapping[str, Any] | None]
    #: Return the payload that a retry without an edit publishes. None: it is unknown, because the original is deleted.
    read_payload: Callable[[FailedTask], Mapping[str, Any] | None]
    edit_permission: str  #: of users who may see and edit that payload
    #: Delete what `publish` has stored under this task id, unless it has started. Return whether it was deleted.
    withdraw: Callable[[FailedTask, UUID, bool], bool]
    #: Sort task ids into the order in which one transaction may publish them. None: any order works, because publishing
    #: waits for no other transaction.
    order: Callable[[Sequence[UUID]], Sequence[UUID]] | None = None


def retry_failed_task(
    failed_id: UUID, actor: Actor, *, as_new: bool = False, due_at: datetime | None = None,
    payload: Mapping[str, Any] | None = None, priority: int | None = None,
) -> UUID:  # fmt: skip
    """Publish a failed task again under a new task id. Return the id.

    The delivery key stays, so a receiver that honours it sees no second effect. With `as_new` the task gets a new key.
    The receiver then gets the message even if it has the first one. The next pass dispatches the task.

    An edited `payload` is checked and gets a new delivery key. The failed task keeps the difference. A payload equal to
    that of the original counts as no edit.

    Raises:
        Conflict: the task was handled already or cannot be published again.
        InvalidInput: the payload is refused, or it needs `as_new` because the first one may have had its effect.
        NotFound: there is no such failed task.
    """
    retry = Retry(new_id(), due_at or sql.now(), as_new, payload, priority)
    with transaction.atomic():
        row = _change_state(failed_id, State.RETRIED, actor, RETRYABLE, retried_as=retry.task_id)
        republisher = find_republisher(row.origin)
        if republisher is None:
            raise Conflict(_("A broker message cannot be published again; ignore or archive it."))
        before = None
        if payload is not None:
            before = republisher.read_payload(row)
            retry = replace(retry, payload=None if is_same_json(payload, before) else payload)
        if retry.payload is not None and row.failure == "unknown" and not as_new:
            raise InvalidInput.of("as_new", _("must be true: the first one may have had its effect"))
        after = republisher.publish(row, retry)
        if after is not None:
            FailedTask.objects.filter(pk=row.pk).update(difference={"before": before, "after": after})
    return retry.task_id


def withdraw_retry(failed_id: str, actor: Actor, *, retried: Mapping[str, str], as_new: bool) -> None:
    """Take a retry back: delete the new touch or job, and open the failed task again.

    `retried` holds the new task id by failed task.

    Raises:
        Conflict: the new task has started, or another user acted on the failed task.
    """
    task_id = UUID(retried[failed_id])
    row = _lock_failed_task(UUID(failed_id))
    republisher = find_republisher(row.origin)
    if row.state != State.RETRIED or row.retried_as != task_id or republisher is None:
        raise Conflict(_("another user acted on the failed task since"))
    if not republisher.withdraw(row, task_id, as_new):
        raise Conflict(_("the retry has started already"))
    FailedTask.objects.filter(pk=row.pk).update(
        state=State.OPEN, actor=None, actor_name="", action_reason="", acted_at=None, retried_as=None, difference=None
    )


def lock_retried(failed_ids: Sequence[str]) -> list[UUID]:
    return lock_in_publish_order([UUID(failed_id) for failed_id in failed_ids])


def lock_in_publish_order(failed_ids: Sequence[UUID]) -> list[UUID]:
    """Lock failed tasks and return the order in which one transaction publishes them again.

    All writers lock failed tasks by id before they publish. No holder of such a lock then waits for a published row.
    """
    rows = FailedTask.objects.select_for_update().filter(pk__in=failed_ids).order_by("pk")
    found = list(rows.values_list("pk", "origin", "task_id"))
    ordered: list[UUID] = []
    for name in sorted({origin for _pk, origin, _task in found}):
        republisher = find_republisher(name)
        if republisher is not None and republisher.order is not None:
            by_task = {task_id: pk for pk, origin, task_id in found if origin == name and task_id}
            ordered += [by_task[each] for each in republisher.order(list(by_task))]
    return [*ordered, *(pk for pk in failed_ids if pk not in ordered)]


def resolve_failed_task(failed_id: UUID, actor: Actor, *, delivered: bool) -> None:
    """Settle an unknown outcome with the operator's finding. "Not delivered" releases the customer's cap slot.

    Raises:
        Conflict: the outcome is not unknown, or the task was handled already.
        NotFound: there is no such failed task.
    """
    with transaction.atomic():
        row = _lock_failed_task(failed_id)
        if row.failure != "unknown":
            raise Conflict(_("Only an unknown outcome can be resolved."))
        _change_state(
            failed_id, State.RESOLVED_DELIVERED if delivered else State.RESOLVED_NOT_DELIVERED, actor, (State.OPEN,)
        )
        if not delivered and row.origin == FailedTask.Origin.TOUCH and row.task_id:
            touch_ledger.release_cap_slot(row.task_id)


def ignore_failed_task(failed_id: UUID, actor: Actor) -> None:
    with transaction.atomic():
        _change_state(failed_id, State.IGNORED, actor, (State.OPEN,))


def archive_failed_task(failed_id: UUID, actor: Actor) -> None:
    with transaction.atomic():
        _change_state(failed_id, State.ARCHIVED, actor, (State.OPEN, State.IGNORED))


def _lock_failed_task(failed_id: UUID) -> FailedTask:
    row = FailedTask.objects.select_for_update().filter(pk=failed_id).first()
    if row is None:
        raise NotFound(_("There is no failed task %(failed_id)s.", failed_id=failed_id))
    return row


def _change_state(failed_id: UUID, state: str, actor: Actor, allowed: Sequence[str], **changes: Any) -> FailedTask:
    row = _lock_failed_task(failed_id)
    changed = FailedTask.objects.filter(pk=failed_id, state__in=allowed).update(
        state=state,
        actor=actor.user,
        actor_name=actor.name[:150],
        action_reason=actor.reason[:500],
        acted_at=Now(),
        **changes,
    )
    if changed != 1:
        raise Conflict(_("It is %(state)s already.", state=name_in_error(State(row.state).label)))
    if not actor.is_bulk:
        action = "resolved" if state in RESOLVED else str(state)
        record_action(action, row, label=str(row), actor=actor.name, reason=actor.reason)
    return row


def republish_touch(row: FailedTask, retry: Retry) -> Mapping[str, Any] | None:
    """Insert a touch for the same event and node.

    A touch that was edited before and is sent as new keeps its edited text, which its delivery key named until now.
    """
    assert row.task_id is not None
    text = retry.payload
    if text is not None:
        text = check_touch_text(text)
    elif retry.as_new and row.root_id:
        text = read_edited_text(row.root_id)
    insert_retry(
        row.task_id, retry.task_id, retry.due_at, as_new=retry.as_new, edited=text is not None, priority=retry.priority
    )
    return text


REPUBLISHER = Republisher(
    republish_touch,
    read_touch_text,
    "scheduling.change_template",
    lambda row, task_id, as_new: delete_unclaimed_retry(task_id, keeps_slot=not as_new),
)


def find_republisher(origin: str) -> Republisher | None:
    """Return how failed tasks of this origin are published again. None: they cannot be."""
    known = find_origin(origin)
    return known.republisher if known else None


def find_origin(origin: str) -> FailedTaskOrigin | None:
    """Return the ledger and republisher of this origin. None: a broker message has neither."""
    return next((app.failed_tasks[origin] for app in integrations() if origin in app.failed_tasks), None)


MAX_COMMENT = 2_000  #: characters
MOST_COMMENTS = 200  #: per failed task


def list_assignable_users() -> list[User]:
    """Return the active users of the back office, by name."""
    return list(User.objects.filter(is_active=True, is_staff=True).order_by("username"))


def assign_failed_task(failed_id: UUID, username: str | None, actor: Actor) -> None:
    """Assign a failed task to a user of the back office; None removes the assignee. Idempotent.

    Raises:
        InvalidInput: `user` names no active user of the back office.
        NotFound: there is no such failed task.
    """
    user = None
    if username is not None:
        named = User.objects.filter(username=username, is_active=True, is_staff=True)
        user = None if "\0" in username else named.first()  # PostgreSQL cannot compare NUL
        if user is None:
            raise InvalidInput.of(
                "user", _("there is no active user “%(name)s” of the back office", name=username[:150])
            )
    with transaction.atomic():
        row = _lock_failed_task(failed_id)
        before = row.assignee
        if before != user:
            row.assignee = user
            row.save(update_fields=["assignee"])
            old, new = (each.get_username() if each else None for each in (before, user))
            record_action("changed", row, label=str(row), actor=actor.name, changes=[("assignee", old, new)])


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
        row = _lock_failed_task(failed_id)
        if row.comments.count() >= MOST_COMMENTS:
            raise InvalidInput.of("text", _("The failed task has %(most)s comments already.", most=MOST_COMMENTS))
        return FailedTaskComment.objects.create(
            failed_task=row, author=actor.user, author_name=actor.name[:150], text=text
        )
