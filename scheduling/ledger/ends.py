"""Read ended touches in the order of their ends, each one once for each reader.

A reader has a name and a mark. The mark moves in the caller's transaction, together with what the reader stores:

    with transaction.atomic():
        batch = ends.take_ends("webhooks", most=500)
        store_rows(batch.ends)  # Committed with the mark: a killed reader repeats nothing and loses nothing.

Repeat while `batch.more`. A new reader starts at its first call, or at `since`. Passes of one reader may run at once:
one gets ends, the others get none. A reader that is no longer needed calls `drop_reader`, because retention keeps the
partitions that a mark has not passed.

An end is read when no transaction can still write an earlier one. That takes `WRITE_LAG` and two calls. A transaction
that stays open delays the readers. If PostgreSQL's clock goes back, for example after a failover, the last minute is
read again. Only then a reader gets an end twice, so what it stores needs a key like `EndedTouch.task_id`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import structlog
from django.db.models import Min

from scheduling import sql
from scheduling.models import EndMark

log = structlog.get_logger(__name__)

#: Touches are dated after their transaction has its id. The lag covers a clock that goes back: that far unnoticed.
WRITE_LAG = timedelta(seconds=2)
READ_AGAIN = timedelta(minutes=1)  #: after the clock went back
FIRST, LAST = UUID(int=0), UUID(int=2**128 - 1)


class EndedTouch(NamedTuple):
    task_id: UUID
    root_id: UUID  #: the delivery key, shared by touches that publish the same message again
    state: str
    reason: str
    settled_at: datetime
    node_id: int
    event_id: UUID
    customer_id: int
    chat_id: str


class Horizon(NamedTuple):
    newest: datetime  #: the start of this transaction, less the lag
    own: int  #: the transaction's id: transactions that ended touches before `newest` have lower ones
    oldest: int  #: the lowest id of a transaction that still runs


class EndBatch(NamedTuple):
    ends: list[EndedTouch]
    more: bool  #: whether the next call returns ends at once


def take_ends(reader: str, *, most: int = 500, since: datetime | None = None) -> EndBatch:
    """Return the next ends for `reader`, at most `most`, and move its mark. Call it in a transaction.

    `since` is where a new reader starts; None: now.
    """
    mark = EndMark.objects.select_for_update(skip_locked=True).filter(pk=reader).first()
    if mark is None:
        sql.execute(_START, {"reader": reader, "first": FIRST, "since": since, "lag": WRITE_LAG})
        return EndBatch([], more=False)
    newest, own, oldest = read_horizon(WRITE_LAG)
    # Move a mark back that the clock or the transaction ids have not reached yet.
    if mark.ceiling_xid > own:  # a transaction id of another cluster: this database was restored from it
        mark.ceiling_xid = own
    if newest < mark.ceiling:
        log.warning("clock_went_back", reader=mark.reader, seconds=(mark.ceiling - newest).total_seconds())
        mark.settled_at, mark.task_id = min(mark.settled_at, newest - READ_AGAIN), FIRST
        mark.ceiling, mark.ceiling_xid = newest, own
    ends: list[EndedTouch] = []
    if oldest >= mark.ceiling_xid:
        span = {"at": mark.settled_at, "task_id": mark.task_id, "ceiling": mark.ceiling, "most": most}
        ends = [EndedTouch(*row) for row in sql.rows(_ENDS, span)]
        if ends:
            mark.settled_at, mark.task_id = ends[-1].settled_at, ends[-1].task_id
        if len(ends) < most:
            mark.settled_at, mark.task_id = mark.ceiling, LAST
            mark.ceiling, mark.ceiling_xid = newest, own
    mark.save()
    return EndBatch(ends, more=len(ends) == most)


def read_horizon(lag: timedelta) -> Horizon:
    """Return up to where readers may set their next ceiling. Call it in a transaction."""
    return Horizon(*sql.rows(_HORIZON, {"lag": lag})[0])


def drop_reader(reader: str) -> None:
    """Forget the mark of a reader. Its next call starts at that moment."""
    EndMark.objects.filter(pk=reader).delete()


def find_oldest_mark() -> datetime | None:
    """Return the instant up to which all readers have read; None without a reader."""
    oldest: datetime | None = EndMark.objects.aggregate(oldest=Min("settled_at"))["oldest"]
    return oldest


def list_mark_ages() -> list[tuple[str, float]]:
    """Return each reader with the seconds since the last end that it may have read. Without load about ten seconds."""
    return [(row[0], row[1]) for row in sql.rows(_AGES, {})]


_AGES = """
SELECT reader, extract(epoch FROM statement_timestamp() - settled_at)::float8 FROM scheduling_endmark ORDER BY reader
"""

_START = """
INSERT INTO scheduling_endmark (reader, settled_at, task_id, ceiling, ceiling_xid)
SELECT %(reader)s, at, %(first)s, at, 0
FROM (SELECT LEAST(statement_timestamp() - %(lag)s, %(since)s::timestamptz) AS at) AS start
ON CONFLICT DO NOTHING
"""

# The transaction's own id, taken after its start, exceeds the ids of all that took theirs before. The end of a snapshot
# does not: running transactions may have greater ids.
_HORIZON = """
SELECT transaction_timestamp() - %(lag)s, pg_current_xact_id()::text::bigint,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint
"""

# The bounds on `settled_at` name the partitions. The comparison of pairs continues inside one instant.
_ENDS = """
SELECT task_id, root_id, state, reason, settled_at, node_id, event_id, customer_id, chat_id
FROM scheduling_touch_ended
WHERE settled_at >= %(at)s AND settled_at <= %(ceiling)s AND (settled_at, task_id) > (%(at)s, %(task_id)s)
ORDER BY settled_at, task_id LIMIT %(most)s
"""
