"""Store jobs that a periodic pass does in batches, and run their batches.

A batch is one transaction that holds the lock of the job's row. Its effects and its progress commit together: a batch
whose worker dies has no effect, and a later pass repeats it. No lock is held between two batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar
from uuid import UUID

import structlog
from django.conf import settings
from django.db import OperationalError, close_old_connections, models, transaction
from django.utils.timezone import now
from django.utils.translation import gettext_lazy
from structlog.contextvars import bind_contextvars, bound_contextvars

from scheduling import sql
from scheduling.error_text import ErrorText as _
from scheduling.errors import Conflict
from scheduling.ids import new_id

log = structlog.get_logger(__name__)

PASS_SECONDS = 4.0  #: then other long work has its turn
MAX_TRIES = 5  #: of one batch before the job fails
#: From the first try of a batch to the second; n times as long after the n-th. Workers that restart are up by then.
RETRY_AFTER = timedelta(seconds=10)


class BatchJob(models.Model):
    """A row that is a job, with its batches."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    actor_name = models.CharField(gettext_lazy("who"), max_length=150)
    ended_at = models.DateTimeField(gettext_lazy("ended at"), null=True)
    ended_by = models.CharField(gettext_lazy("ended by"), max_length=150, blank=True)
    #: How often the current batch was started.
    tries = models.PositiveSmallIntegerField(default=0)
    #: The earliest start of its next try, by the database's clock.
    retry_at = models.DateTimeField(default=now)

    class Meta:
        abstract = True

    @property
    def place(self) -> int:
        """Return where in the work the next batch starts, for the log."""
        raise NotImplementedError


Job = TypeVar("Job", bound=BatchJob)


def run_in_turn(jobs: models.QuerySet[Job], run_next: Callable[[UUID], bool]) -> None:
    """Run batches of jobs in turn for `PASS_SECONDS`. `run_next` returns whether another one follows.

    A job that fails stops no other. After a slow batch the rest has its turn in the next pass. The order of `jobs`
    therefore puts those first that waited longest, and failing ones behind them.
    """
    ends_at = time.monotonic() + PASS_SECONDS
    waiting = deque(jobs.values_list("pk", flat=True))
    while waiting and time.monotonic() < ends_at:
        job_id = waiting.popleft()
        with bound_contextvars(place=None):  # `run_counted_batch` sets it for the log
            try:
                has_more = run_next(job_id)
            except Exception:
                log.exception("batch_failed", job=jobs.model._meta.label_lower, id=str(job_id))
                close_old_connections()
                has_more = False
        if has_more:
            waiting.append(job_id)


def run_counted_batch(
    due: models.QuerySet[Job], work: Callable[[Job], None], abandon: Callable[[Job], None]
) -> Job | None:
    """Let `work` do one batch of the job in `due`, and note the progress in its row. Return the row.

    None: the job has no batch now, another worker has it, or its next try is not due. `abandon` ends the row of a job
    whose batch was tried `MAX_TRIES` times.
    """
    if not count_try(due, abandon):
        return None
    with sql.limit_statement_time(settings.TIMEOUTS.bulk_batch):
        # Another worker can hold the row only while it asks whether a try is due: `count_try` skips a row that runs.
        row = due.select_for_update(of=("self",)).first()
        if row is not None:
            bind_contextvars(place=row.place)
            work(row)
            row.tries = 0
            row.save()
        return row


@transaction.atomic
def count_try(due: models.QuerySet[Job], abandon: Callable[[Job], None]) -> bool:
    """Count a try before it starts, so that a batch that kills its worker is not repeated without end.

    Return whether it may start.
    """
    row = due.select_for_update(skip_locked=True, of=("self",)).first()
    at = sql.now()
    if row is None or (row.tries and at < row.retry_at):
        return False
    may_run = row.tries < MAX_TRIES
    if may_run:
        row.tries += 1
        row.retry_at = at + RETRY_AFTER * row.tries
    else:
        abandon(row)
        log.error("batches_abandoned", job=row._meta.label_lower, id=str(row.pk), place=row.place)
    row.save()
    return may_run


@contextmanager
def lock_job(rows: models.QuerySet[Job]) -> Iterator[Job | None]:
    """Open a transaction that holds the lock of the job in `rows`, if there is one.

    Raises:
        Conflict: its current batch takes longer than `TIMEOUTS.bulk_cancel`.
    """
    try:
        with sql.brief_lock_waits(settings.TIMEOUTS.bulk_cancel):
            yield rows.select_for_update(of=("self",)).first()
    except OperationalError as error:
        if not sql.is_lock_timeout(error):
            raise
        raise Conflict(_("A batch is running. Try again in a moment.")) from None
