"""Apply one action to all rows that match a filter, in batches of a periodic pass.

A batch is one transaction that holds the lock of the action's row. Its effects and its progress commit together: a
batch whose worker dies has no effect, and the next pass repeats it. No lock is held between two batches. The ledger is
the rate limiter: each row is published with its own due time, at most one pass ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from math import ceil
from typing import Any
from uuid import UUID

import structlog
from django.conf import settings
from django.db import OperationalError, close_old_connections, connection, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.timezone import now

from scheduling import sql
from scheduling.audit.audit_log import record_action
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict, InvalidInput, NotFound
from scheduling.models import BulkAction
from scheduling.operations.bulk_lists import find_row_action, matching_rows
from scheduling.operations.failed_tasks import Actor
from scheduling.operations.row_actions import Given, RowAction

log = structlog.get_logger(__name__)

BATCH = 100  #: most rows per transaction
PASS_INTERVAL = timedelta(seconds=5)  #: of `continue_bulk_actions`
SLOWEST, FASTEST = 0.1, 200.0  #: rows per second
MOST_RUNNING = 20
MAX_TRIES = 5  #: errors of one batch before the action fails
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
        raise InvalidInput.of(
            "per_second", _("must be from %(least)s to %(most)s", least=f"{SLOWEST:g}", most=f"{FASTEST:g}")
        )
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
            raise Conflict(_("The same bulk action is already running."))
        if len(running) >= MOST_RUNNING:
            raise Conflict(_("Too many bulk actions are running. Try again when one has finished."))
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
        raise InvalidInput.of("action", _("there is no “%(name)s”", name=action[:50]))
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
        raise Conflict(_("The bulk action has already ended."))
    raise NotFound(_("There is no bulk action %(action_id)s.", action_id=action_id))


def undo_start(action_id: str, actor: Actor) -> None:
    """Stop an action whose first batch has not started, so that it has changed no row.

    Raises:
        Conflict: it has started or ended.
    """
    untouched = BulkAction.objects.filter(pk=action_id, position=None)
    if not _stop_running(untouched, actor):
        raise Conflict(_("the bulk action has started already; stop it on its page"))


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
        raise Conflict(_("A batch of this bulk action is running. Try again in a moment.")) from None


# --- worker -------------------------------------------------------------------------------------------------------


def continue_bulk_actions() -> None:
    """Process the rows of all running actions that are due until the next pass. One that fails stops no other."""
    due = BulkAction.objects.filter(state=State.RUNNING, next_at__lte=Now()).order_by("next_at")
    for action_id in list(due.values_list("pk", flat=True)):
        try:
            until = sql.now() + PASS_INTERVAL
            while _count_try(action_id) and run_batch(action_id, until):
                pass
        except Exception:
            log.exception("bulk_batch_failed", id=str(action_id))
            close_old_connections()


@transaction.atomic
def _count_try(action_id: UUID) -> bool:
    """Count a try before it starts, so that a batch that kills its worker is not repeated without end.

    Return False if the action has failed with it, or if another worker runs its batch.
    """
    running = BulkAction.objects.select_for_update(skip_locked=True, of=("self",))
    row = running.filter(pk=action_id, state=State.RUNNING).first()
    if row is None:
        return False
    if row.tries >= MAX_TRIES:
        row.state, row.ended_at = State.FAILED, now()
        row.note = f"{row.note}\nthe same batch could not be finished {MAX_TRIES} times".strip()
        log.error("bulk_action_abandoned", id=str(row.pk), position=str(row.position))
    else:
        row.tries += 1
    row.save(update_fields=["tries", "state", "ended_at", "note"])
    return row.state == State.RUNNING


def run_batch(action_id: UUID, until: datetime) -> bool:
    """Process at most `BATCH` of the rows due before `until`, each with its due time. Return whether more may be left.

    Of two concurrent workers the second finds the row locked, and leaves the batch to the first.
    """
    with sql.limit_statement_time(settings.TIMEOUTS.bulk_batch):
        running = BulkAction.objects.filter(pk=action_id, state=State.RUNNING, next_at__lt=until)
        mine = running.select_for_update(skip_locked=True, of=("self",))
        row = mine.select_related("actor").annotate(at=Now()).first()
        if row is None:
            return False
        start = max(row.next_at, row.at)  # after an outage the rate holds too
        size = max(1, min(BATCH, ceil((until - start).total_seconds() * row.per_second)))
        _process_batch(row, size, start)
        row.save()
    if row.state != State.RUNNING:
        log.info("bulk_action_done", id=str(row.pk), done=row.done, skipped=row.skipped, failed=row.failed)
    return row.state == State.RUNNING and row.next_at < until


def _process_batch(row: BulkAction, size: int, start: datetime) -> None:
    row_action = _get_row_action(row)
    rows = _matching_rows(row)
    if row.position:
        rows = rows.filter(pk__gt=row.position)
    keys = list(rows.order_by("pk").values_list("pk", flat=True)[:size])
    actor = Actor(row.actor_name, row.actor, row.reason, is_bulk=True)
    became: Counter[str] = Counter()
    for key in row_action.lock(keys) if row_action.lock else keys:
        due_at = start + timedelta(seconds=became["done"] / row.per_second)
        became[_apply_to_row(row, row_action, key, actor, due_at)] += 1
    row.done += became["done"]
    row.skipped += became["skipped"]
    row.failed += became["failed"]
    row.tries = 0
    if keys:
        row.position = keys[-1]
    if len(keys) < size:
        row.state, row.ended_at = State.DONE, now()
    row.next_at = start + timedelta(seconds=len(keys) / row.per_second)


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
        raise InvalidInput.of("action", _("there is no “%(name)s”", name=row.action))
    return row_action
