"""Apply one action to all rows that match a list's filter, in batches of a periodic pass.

The start stores the ids of the rows. Rows that match later stay unchanged. The ledger is the rate limiter: each row is
published with its own due time, at most one pass ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import UUID

import structlog
from django.conf import settings
from django.contrib.auth.models import User
from django.db import OperationalError, connection, transaction
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Now
from django.utils.functional import Promise
from django.utils.timezone import now
from django.utils.translation import gettext_lazy, ngettext_lazy
from psycopg.errors import QueryCanceled

from scheduling import sql
from scheduling.app_integrations import integrations
from scheduling.audit import record_action
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, FieldError, InvalidInput, NotFound
from scheduling.ledger import locks
from scheduling.models import WAITING, BulkAction, FailedTask, Scope, Touch
from scheduling.models.batch_job import MAX_TRIES, lock_job, run_counted_batch, run_in_turn
from scheduling.operations import commands, failed_tasks
from scheduling.operations.failed_tasks import Actor

log = structlog.get_logger(__name__)

Found = TypeVar("Found")
Given = Mapping[str, Any]
NOTHING: Given = MappingProxyType({})


def refuse_parameters(given: Given) -> None:
    """Check the parameters of an action that takes none.

    Raises:
        InvalidInput: there is one; the error names it.
    """
    if given:
        raise InvalidInput(*(FieldError(f"given.{name}", _("is no parameter of this action")) for name in given))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAction:
    """An action on one row, with its texts. Its function gets the key and the actor.

    Raises:
        Conflict: another process changed the row first, or its state does not allow the action.
        NotFound: the row does not exist.
    """

    model: type[Model]
    function: Callable[..., Any]
    states: tuple[str, ...]
    permission: str  #: of a user who may start and stop it
    title: str | Promise
    explains: str | Promise
    applies: Any  #: a lazy sentence with the number of rows, `count`
    warning: str | Promise = ""
    icon: str = ""
    of_job: tuple[str | Promise, str | Promise] | None = None  #: title and explanation for failed RPA jobs
    scope: str = ""  #: of an API key that may read and stop its bulk actions; empty: no key may
    danger: bool = False
    unknown_only: bool = False
    publishes: bool = False
    as_new: bool = False  #: the customer may receive a message twice
    per_second: float = 200  #: default rate in rows per second
    #: Check the parameters that a user gives. Raises `InvalidInput`.
    check: Callable[[Given], None] = refuse_parameters
    #: Return the parameters that restrict the action to the rights of the user who starts it. Workers check no rights.
    restrict: Callable[[User], Given] = lambda user: {}
    #: Lock what a batch needs, and return the order in which one transaction may change the rows. None: any order
    #: works, because the action waits for no other transaction.
    lock: Callable[[Sequence[UUID]], Sequence[UUID]] | None = None

    def act(self, key: UUID, actor: Actor, due_at: datetime | None = None, given: Given = NOTHING) -> Any:
        timing = {"due_at": due_at} if self.publishes else {}
        return self.function(key, actor, **timing, **given)

    def allowed_rows(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        rows = rows.filter(state__in=self.states)
        return rows.filter(failure="unknown") if self.unknown_only else rows

    def applies_to(self, row: FailedTask) -> bool:
        if row.state not in self.states or (self.unknown_only and row.failure != "unknown"):
            return False
        return not (self.publishes and row.origin == FailedTask.Origin.MESSAGE)

    def for_origins(self, *origins: str) -> RowAction:
        """Return the texts for these failed tasks: a touch is sent to a customer, a job has an effect."""
        if self.of_job is None or set(origins) != {FailedTask.Origin.RPA_JOB}:
            return self
        title, explains = self.of_job
        return replace(self, title=title, explains=explains)


HANDLE = "scheduling.act_on_failedtask"  #: the permission to act on failed tasks
OPEN, IGNORED = FailedTask.State.OPEN.value, FailedTask.State.IGNORED.value
#: Rows per second: low enough not to flood a receiver that has just recovered.
RETRY_RATE = 50
_HANDLES: dict[str, Any] = {
    "model": FailedTask, "permission": HANDLE, "scope": Scope.FAILED_TASKS.value,
    "applies": ngettext_lazy("Applies to %(count)s failed task.", "Applies to %(count)s failed tasks.", "count"),
}  # fmt: skip
_REPUBLISHES: dict[str, Any] = {
    **_HANDLES, "publishes": True, "per_second": RETRY_RATE, "lock": failed_tasks.lock_in_publish_order,
    "states": (OPEN, IGNORED),
}  # fmt: skip
FAILED_TASK_ACTIONS = {
    "retry": RowAction(
        function=failed_tasks.retry_failed_task,
        title=gettext_lazy("Retry"),
        explains=gettext_lazy(
            "Publishes the touch again with the same delivery key. A receiver that checks the key "
            "accepts the message at most once. The guards are checked again."
        ),
        icon="replay",
        of_job=(
            gettext_lazy("Retry"),
            gettext_lazy(
                "Publishes a new job with the same delivery key. A flow that checks the key has no second effect."
            ),
        ),
        **_REPUBLISHES,
    ),
    "again": RowAction(
        function=partial(failed_tasks.retry_failed_task, as_new=True),
        as_new=True,
        danger=True,
        title=gettext_lazy("Send again as new"),
        explains=gettext_lazy(
            "Sends with a new delivery key. If the first message was delivered, the customer receives it twice."
        ),
        icon="forward_to_inbox",
        of_job=(
            gettext_lazy("Run again as new"),
            gettext_lazy(
                "The new job gets its own delivery key. If the first run took effect, the effect happens twice."
            ),
        ),
        **_REPUBLISHES,
    ),
    "delivered": RowAction(
        function=partial(failed_tasks.resolve_failed_task, delivered=True),
        states=(OPEN,),
        unknown_only=True,
        title=gettext_lazy("Mark as delivered"),
        explains=gettext_lazy(
            "Use after you have verified that the message arrived. The message still counts toward the customer's caps."
        ),
        icon="task_alt",
        of_job=(
            gettext_lazy("Mark as succeeded"),
            gettext_lazy("Use after you have verified that the run did its work. Nothing runs again."),
        ),
        **_HANDLES,
    ),
    "not_delivered": RowAction(
        function=partial(failed_tasks.resolve_failed_task, delivered=False),
        states=(OPEN,),
        unknown_only=True,
        title=gettext_lazy("Mark as not delivered"),
        explains=gettext_lazy("Use after you have verified that the message did not arrive. The cap slot is released."),
        icon="unpublished",
        of_job=(
            gettext_lazy("Mark as without effect"),
            gettext_lazy(
                "Use after you have verified that the run changed nothing. This action alone runs nothing again."
            ),
        ),
        **_HANDLES,
    ),
    "ignore": RowAction(
        function=failed_tasks.ignore_failed_task,
        states=(OPEN,),
        title=gettext_lazy("Ignore"),
        explains=gettext_lazy("Sends nothing. The failed task is no longer open and can still be retried later."),
        icon="visibility_off",
        of_job=(
            gettext_lazy("Ignore"),
            gettext_lazy("Runs nothing. The failed task is no longer open and can still be retried later."),
        ),
        **_HANDLES,
    ),
    "archive": RowAction(
        function=failed_tasks.archive_failed_task,
        states=(OPEN, IGNORED),
        title=gettext_lazy("Archive"),
        explains=gettext_lazy("Closes the failed task for good. The record stays readable and cannot be retried."),
        icon="archive",
        **_HANDLES,
    ),
}


def _cancel_touch(task_id: UUID, actor: Actor) -> None:
    # A batch locks up to a hundred touches, and settling locks many in any order, so waiting could deadlock.
    commands.cancel_one_touch(task_id, actor=actor.name, wait=False)


def _lock_customers_first(task_ids: Sequence[UUID]) -> Sequence[UUID]:
    """Lock the customers of these touches before the touches, as every writer does."""
    locks.lock_customers_of_touches(task_ids)
    return task_ids


TOUCH_ACTIONS = {
    "cancel": RowAction(
        model=Touch, function=_cancel_touch, states=WAITING, permission="scheduling.change_touch",
        title=gettext_lazy("Cancel waiting touches"), explains=gettext_lazy("They will not be sent."), danger=True,
        applies=ngettext_lazy("Applies to %(count)s touch.", "Applies to %(count)s touches.", "count"),
        lock=_lock_customers_first,
    ),
}  # fmt: skip


def row_actions() -> dict[str, RowAction]:
    """Return the actions of all apps by name. An upgrade may remove one that a stored bulk action names."""
    of_apps = {name: action for app in integrations() for name, action in app.row_actions.items()}
    return {**FAILED_TASK_ACTIONS, **TOUCH_ACTIONS, **of_apps}


MOST_ROWS = 100_000  #: of one bulk action
BATCH = 100  #: most rows per transaction
PASS_INTERVAL = timedelta(seconds=5)  #: of `continue_bulk_actions`
SLOWEST, FASTEST = 0.1, 200.0  #: rows per second
MOST_RUNNING = 20
START_LOCK_ID = 4_163_072  #: advisory lock for starting an action

State = BulkAction.State
UNTOUCHED = Q(done=0, skipped=0, failed=0)  #: no batch has ended


# --- user ---------------------------------------------------------------------------------------------------------


def select_rows(action: RowAction, rows: QuerySet[Any]) -> dict[UUID, str]:
    """Return the state of each of the rows that allows the action, by key.

    Raises:
        InvalidInput: there are more than `MOST_ROWS`, or the search takes longer than `TIMEOUTS.bulk_selection`.
    """
    found = _read_selection(action, rows, dict)
    _check_count(len(found))
    return found


def count_rows(action: RowAction, rows: QuerySet[Any]) -> int:
    """Return how many of the rows allow the action.

    Raises:
        InvalidInput: as `select_rows`.
    """
    count = _read_selection(action, rows, lambda selected: selected.count())
    _check_count(count)
    return count


def _read_selection(action: RowAction, rows: QuerySet[Any], read: Callable[[QuerySet[Any]], Found]) -> Found:
    selected = action.allowed_rows(rows).order_by().values_list("pk", "state")[: MOST_ROWS + 1]
    try:
        with sql.limit_statement_time(settings.TIMEOUTS.bulk_selection):
            return read(selected)
    except OperationalError as error:
        if not isinstance(error.__cause__, QueryCanceled):
            raise
        raise InvalidInput.of("filter", _("Too many rows to search. Narrow the list first.")) from None


def _check_count(count: int) -> None:
    if count > MOST_ROWS:
        raise InvalidInput.of("filter", _("More than %(most)s rows match. Narrow the list first.", most=MOST_ROWS))


def start_bulk_action(
    name: str, rows: QuerySet[Any], actor: Actor, *, chosen: Mapping[str, str] = NOTHING,
    per_second: float | None = None, given: Given = NOTHING, after: timedelta = timedelta(0),
) -> BulkAction:  # fmt: skip
    """Start an action on those of the rows that allow it.

    `chosen` is the filter that selected them, as the user sees it. `per_second` is the rate in rows per second. `given`
    are the parameters of the action. The rights of the acting user may add some. The first batch starts `after` now.

    Raises:
        InvalidInput: a parameter has no meaning, or too many rows match; the error names the field.
        Conflict: the action is running with the same rows or the same filter, or `MOST_RUNNING` others are.
    """
    action = row_actions()[name]
    action.check(given)
    restriction = action.restrict(actor.user) if actor.user else {}
    pace = action.per_second if per_second is None else per_second
    if not SLOWEST <= pace <= FASTEST:
        raise InvalidInput.of(
            "per_second", _("must be from %(least)s to %(most)s", least=f"{SLOWEST:g}", most=f"{FASTEST:g}")
        )
    found = select_rows(action, rows)
    # Only users change the state of a failed task, so one in another state than those selected is skipped.
    states = set(found.values()) if action.model is FailedTask else action.states
    row = BulkAction(
        action=name, filter=dict(chosen), given={**given, **restriction}, keys=sorted(found), total=len(found),
        states=sorted(states), actor=actor.user, actor_name=actor.name[:150], reason=actor.reason[:500],
        per_second=pace, next_at=sql.now() + after,
    )  # fmt: skip
    with transaction.atomic():
        with connection.cursor() as cursor:  # of two concurrent starts the second sees the first
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [START_LOCK_ID])
        running = BulkAction.objects.filter(state=State.RUNNING)
        # A list of the back office and the API name the same filter differently.
        same = Q(filter=row.filter) | Q(total=row.total, keys=row.keys, total__gt=0)
        if running.filter(same, action=row.action, given=row.given).exists():
            raise Conflict(_("The same bulk action is already running."))
        if running.count() >= MOST_RUNNING:
            raise Conflict(_("Too many bulk actions are running. Try again when one has finished."))
        row.save(force_insert=True)
        facts = [("action", None, row.action), ("rows", None, row.total)]
        record_action("started", row, label=row.action, actor=row.actor_name, reason=row.reason, changes=facts)
    log.info("bulk_action_started", id=str(row.pk), action=name, filter=row.filter, rows=row.total, actor=actor.name)
    return row


def cancel_bulk_action(action_id: UUID, actor: Actor) -> None:
    """Stop an action before its next batch.

    Raises:
        Conflict: the action has ended, or its current batch takes longer than `TIMEOUTS.bulk_cancel`.
        NotFound: there is no such action.
    """
    mine = BulkAction.objects.filter(pk=action_id)
    if _stop_running(mine, actor):
        log.info("bulk_action_cancelled", id=str(action_id), actor=actor.name)
        return
    if mine.exists():
        raise Conflict(_("The bulk action has already ended."))
    raise NotFound(_("There is no bulk action %(action_id)s.", action_id=action_id))


def undo_start(action_id: str, actor: Actor) -> None:
    """Stop an action whose first batch has not ended, so that it has changed no row.

    Raises:
        Conflict: it has started or ended.
    """
    if not _stop_running(BulkAction.objects.filter(UNTOUCHED, pk=action_id), actor):
        raise Conflict(_("the bulk action has started already; stop it on its page"))


def _stop_running(mine: QuerySet[BulkAction], actor: Actor) -> bool:
    with lock_job(mine.filter(state=State.RUNNING)) as row:
        if row is None:
            return False
        row.state, row.ended_at, row.ended_by = State.CANCELLED, now(), actor.name[:150]
        row.save()
        record_action("cancelled", row, label=row.action, actor=actor.name)
    return True


# --- worker -------------------------------------------------------------------------------------------------------


def continue_bulk_actions() -> None:
    """Process the rows of all running actions that are due until the next pass."""
    until: dict[UUID, datetime] = {}  #: from the first turn of each, so that a slow action takes no rows from another

    def run_next(action_id: UUID) -> bool:
        if action_id not in until:
            until[action_id] = sql.now() + PASS_INTERVAL
        return run_batch(action_id, until[action_id])

    # One that has begun may be due again some milliseconds after this pass has looked. Without it every second pass
    # would be lost. One that has not begun can still be undone.
    due = Q(next_at__lte=Now()) | ~UNTOUCHED & Q(next_at__lt=Now() + PASS_INTERVAL)
    run_in_turn(BulkAction.objects.filter(due, state=State.RUNNING).order_by("tries", "next_at"), run_next)


def run_batch(action_id: UUID, until: datetime) -> bool:
    """Process at most `BATCH` of the rows due before `until`, each with its due time. Return whether more may be left.

    Of two concurrent workers one runs the batch.
    """
    running = BulkAction.objects.filter(pk=action_id, state=State.RUNNING, next_at__lt=until)
    row = run_counted_batch(running.select_related("actor"), partial(_process_batch, until=until), _abandon)
    if row is None:
        return False
    if row.state != State.RUNNING:
        log.info("bulk_action_done", id=str(row.pk), done=row.done, skipped=row.skipped, failed=row.failed)
    return row.state == State.RUNNING and row.next_at < until


def _abandon(row: BulkAction) -> None:
    row.state, row.ended_at = State.FAILED, now()
    row.note = f"{row.note}\nthe same batch could not be finished {MAX_TRIES} times".strip()


def _process_batch(row: BulkAction, until: datetime) -> None:
    action = row_actions()[row.action]
    start = max(row.next_at, sql.now())  # after an outage the rate holds too
    size = max(1, min(BATCH, ceil((until - start).total_seconds() * row.per_second)))
    mine = BulkAction.objects.filter(pk=row.pk)
    keys: Sequence[UUID] = mine.values_list(f"keys__{row.processed}_{row.processed + size}").get()[0]
    actor = Actor(row.actor_name, row.actor, row.reason, is_bulk=True)
    ordered = action.lock(keys) if action.lock else keys
    # In a later statement than the locks: another user may have changed a row while this batch waited for it.
    unchanged = action.model._default_manager.filter(pk__in=keys, state__in=row.states)
    allowed = set(unchanged.values_list("pk", flat=True))
    became: Counter[str] = Counter()
    for key in ordered:
        if key in allowed:
            due_at = start + timedelta(seconds=became["done"] / row.per_second)
            became[_apply_to_row(row, action, key, actor, due_at)] += 1
    row.done += became["done"]
    row.failed += became["failed"]
    row.skipped += len(keys) - became["done"] - became["failed"]
    if not keys or row.processed >= row.total:
        row.state, row.ended_at = State.DONE, now()
    row.next_at = start + timedelta(seconds=len(keys) / row.per_second)


def _apply_to_row(row: BulkAction, action: RowAction, key: UUID, actor: Actor, due_at: datetime) -> str:
    """Process one row within a savepoint, so that its failure does not undo the others."""
    try:
        with transaction.atomic():
            action.act(key, actor, due_at, row.given)
    except (Conflict, NotFound):
        return "skipped"
    except sql.UNAVAILABLE_ERRORS:
        raise  # an error of PostgreSQL, not of this row
    except Exception as error:
        log.exception("bulk_row_failed", id=str(row.pk), key=str(key))
        row.note = f"{row.note}\n{key}: {type(error).__name__}: {error}".strip()[:2000]
        return "failed"
    return "done"
