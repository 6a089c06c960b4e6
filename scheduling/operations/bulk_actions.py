"""Apply one action to all rows that match a filter, in batches on workers.

A batch is one transaction that holds the lock of the action's row. Its effects and its progress commit together: a
batch whose worker dies has no effect, and another worker repeats it. No lock is held between two batches. Each batch is
requested at its time; a tick requests overdue ones again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from time import monotonic
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.timezone import now

from scheduling import sql
from scheduling.audit.audit_log import record_action
from scheduling.errors import Conflict, InvalidInput, NotFound
from scheduling.models import BulkAction
from scheduling.operations.bulk_lists import find_row_action, matching_rows
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.row_actions import Given, RowAction

log = structlog.get_logger(__name__)

BATCH = 100  #: most rows per transaction
BATCH_SPAN = 2.0  #: seconds; at a slow rate a batch holds the rows of this span
SLOWEST, FASTEST = 0.1, 200.0  #: rows per second
MOST_RUNNING = 20
RESERVED_FOR = timedelta(
    seconds=10
)  #: after that time a batch is repeated, unless its worker still holds the row's lock
MAX_TRIES = 5  #: tries of one batch before the action fails
START_LOCK_ID = 4_163_072  #: advisory lock for starting an action

State = BulkAction.State


# --- user ---------------------------------------------------------------------------------------------------------


def start_bulk_action(
    action: str, chosen: Mapping[str, str], actor: Actor, *, per_second: float | None = None,
    as_of: datetime | None = None, given: Given | None = None, after: timedelta = timedelta(0),
) -> BulkAction:  # fmt: skip
    """Start an action on all rows that match `chosen` and existed at `as_of` (default: now).

    `per_second` is the rate in rows per second. `given` are the parameters of the action. The rights of the acting user
    may add some. The first batch starts `after` now.

    Raises:
        InvalidInput: a parameter has no meaning; the error names it.
        Conflict: the same action is running, or `MOST_RUNNING` others are.
    """
    at = sql.now()  # excludes later rows, by PostgreSQL's clock instead of this node's
    row_action = check_action(action, chosen, as_of or at)
    row_action.check(given or {})
    restriction = row_action.restrict(actor.user) if actor.user else {}
    pace = row_action.per_second if per_second is None else per_second
    if not SLOWEST <= pace <= FASTEST:
        raise InvalidInput.of("per_second", f"must be from {SLOWEST:g} to {FASTEST:g}")
    row = BulkAction(
        action=action, filter=dict(chosen), actor=actor.user, actor_name=actor.name[:150], reason=actor.reason[:500],
        per_second=pace, as_of=min(as_of or at, at), next_at=at + after, given={**(given or {}), **restriction},
    )  # fmt: skip
    row.total = count_matching(row)
    _insert_exclusively(row)
    log.info("bulk_action_started", id=str(row.pk), action=action, filter=row.filter, rows=row.total, actor=actor.name)
    return row


def _insert_exclusively(row: BulkAction) -> None:
    """Insert the action under an advisory lock. Of two concurrent starts the second sees the first."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [START_LOCK_ID])
        running = list(BulkAction.objects.filter(state=State.RUNNING).values_list("action", "filter", "given"))
        if (row.action, row.filter, row.given) in running:
            raise Conflict("the same bulk action is already running")
        if len(running) >= MOST_RUNNING:
            raise Conflict("too many bulk actions are running; try again when one has finished")
        row.save(force_insert=True)
        facts = [("action", None, row.action), ("rows", None, row.total)]
        record_action("started", row, label=row.action, actor=row.actor_name, reason=row.reason, changes=facts)


def check_action(action: str, chosen: Mapping[str, str], as_of: datetime) -> RowAction:
    """Check action and filter. Return the action.

    Raises:
        InvalidInput: one has no meaning; the error names it.
    """
    row_action = find_row_action(action)
    if row_action is None:
        raise InvalidInput.of("action", f"there is no “{action[:50]}”")
    matching_rows(row_action, chosen, as_of)
    return row_action


def count_matching(row: BulkAction) -> int | None:
    """Return the number of matching rows, or None if the count takes longer than `TIMEOUTS.bulk_count`."""
    rows = _matching_rows(row)
    try:
        with sql.limit_statement_time(settings.TIMEOUTS.bulk_count):
            return rows.count()
    except OperationalError:
        return None


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
        raise Conflict("the bulk action has already ended")
    raise NotFound(f"There is no bulk action {action_id}.")


def undo_start(action_id: str, actor: Actor) -> None:
    """Stop an action whose first batch has not started, so that it has changed no row.

    Raises:
        Conflict: it has started or ended.
    """
    untouched = BulkAction.objects.filter(pk=action_id, position=None, tries=0)
    if not _stop_running(untouched, actor):
        raise Conflict("the bulk action has started already; stop it on its page")


def _stop_running(mine: QuerySet[BulkAction], actor: Actor) -> bool:
    stopped = {"state": State.CANCELLED, "ended_at": now(), "ended_by": actor.name[:150]}
    try:
        with sql.brief_lock_waits(settings.TIMEOUTS.bulk_cancel):
            stopped_rows = list(mine.filter(state=State.RUNNING).select_for_update())
            for row in stopped_rows:
                mine.update(**stopped)
                record_action("cancelled", row, label=row.action, actor=actor.name)
            return bool(stopped_rows)
    except OperationalError as error:
        if not sql.is_lock_timeout(error):
            raise
        raise Conflict("a batch of this bulk action is running; try again in a moment") from None


# --- worker -------------------------------------------------------------------------------------------------------


def due_actions() -> list[UUID]:
    """Return the actions whose next batch is due, or whose worker died."""
    return list(_due_rows().order_by("next_at").values_list("pk", flat=True))


def _due_rows() -> QuerySet[BulkAction]:
    return BulkAction.objects.filter(state=State.RUNNING, next_at__lte=Now())


def run_batch(action_id: UUID) -> timedelta | None:
    """Run one batch. Return the wait before the next one.

    None: no further batch, or another worker has it.
    """
    held_until = reserve_batch(action_id)
    if held_until is None:
        return None
    with sql.limit_statement_time(settings.TIMEOUTS.bulk_batch):
        row = _lock_action(BulkAction.objects.filter(pk=action_id, state=State.RUNNING, next_at=held_until))
        if row is None:
            return None  # cancelled, or so late that another worker has repeated this batch
        since = monotonic()  # this node's clock may be ahead of PostgreSQL's, and a premature request finds nothing
        process_batch(row, row.at)  # type: ignore[attr-defined]
        row.save()
    if row.state != State.RUNNING:
        log.info("bulk_action_done", id=str(row.pk), done=row.done, skipped=row.skipped, failed=row.failed)
        return None
    wait: timedelta = row.next_at - row.at - timedelta(seconds=monotonic() - since)  # type: ignore[attr-defined]
    return max(wait, timedelta(0))


def reserve_batch(action_id: UUID) -> datetime | None:
    """Reserve the next batch. Return the end of the reservation; None if there is nothing to do.

    A separate transaction counts the try, so that a batch that kills its worker each time ends after `MAX_TRIES`. Of
    concurrent workers one gets the batch.
    """
    with transaction.atomic():
        row = _lock_action(_due_rows().filter(pk=action_id))
        if row is None:
            return None
        if row.tries < MAX_TRIES:
            row.tries += 1
            row.next_at = row.at + RESERVED_FOR  # type: ignore[attr-defined]
        else:
            row.state, row.ended_at = State.FAILED, now()
            row.note = f"{row.note}\nthe same batch could not be finished {MAX_TRIES} times".strip()
            log.error("bulk_action_abandoned", id=str(row.pk), position=str(row.position))
        row.save(update_fields=["tries", "next_at", "state", "ended_at", "note"])
        return row.next_at if row.state == State.RUNNING else None


def _lock_action(rows: QuerySet[BulkAction]) -> BulkAction | None:
    """Return the row locked for this transaction, with PostgreSQL's time. None if another transaction has it."""
    mine = rows.select_for_update(skip_locked=True, of=("self",))
    return mine.select_related("actor").annotate(at=Now()).first()


def process_batch(row: BulkAction, at: datetime) -> None:
    """Process one batch. The caller saves the row in the same transaction."""
    row_action, size = _get_row_action(row), _batch_size(row.per_second)
    rows = _matching_rows(row)
    if row.position:
        rows = rows.filter(pk__gt=row.position)
    keys = list(rows.order_by("pk").values_list("pk", flat=True)[:size])
    actor = Actor(row.actor_name, row.actor, row.reason, is_bulk=True)
    became: Counter[str] = Counter()
    for key in row_action.lock(keys) if row_action.lock else keys:
        due_at = at + timedelta(seconds=became["done"] / row.per_second)
        became[_apply_to_row(row, row_action, key, actor, due_at)] += 1
    row.done += became["done"]
    row.skipped += became["skipped"]
    row.failed += became["failed"]
    row.tries = 0
    if keys:
        row.position = keys[-1]
    if len(keys) < size:
        row.state, row.ended_at = State.DONE, now()
    row.next_at = at + timedelta(seconds=len(keys) / row.per_second)


def _batch_size(per_second: float) -> int:
    return max(1, min(BATCH, round(per_second * BATCH_SPAN)))


def _apply_to_row(row: BulkAction, row_action: RowAction, key: UUID, actor: Actor, due_at: datetime) -> str:
    """Process one row within a savepoint, so that its failure does not undo the others."""
    try:
        with transaction.atomic():
            row_action.act(key, actor, due_at, row.given)
    except (Conflict, NotFound):
        return "skipped"
    except sql.UNAVAILABLE_ERRORS:
        raise  # an error of PostgreSQL, not of this row
    except Exception as error:
        log.exception("bulk_row_failed", id=str(row.pk), key=str(key))
        row.note = f"{row.note}\n{key}: {type(error).__name__}: {error}".strip()[:2000]
        return "failed"
    return "done"


def _matching_rows(row: BulkAction) -> QuerySet[Any]:
    return matching_rows(_get_row_action(row), row.filter, row.as_of)


def _get_row_action(row: BulkAction) -> RowAction:
    row_action = find_row_action(row.action)
    if row_action is None:
        raise InvalidInput.of("action", f"there is no “{row.action}”")
    return row_action
