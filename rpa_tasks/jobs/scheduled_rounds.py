"""Store rounds of periodic tasks as rows, which workers claim and publish.

Beat stores a round before it publishes a wake-up message. If the message or its worker is lost, the pass
`rpa_tasks.rescue` claims the round. Each batch of jobs and the position behind it are stored in one transaction,
fenced by `lease_no`. A repeated round therefore publishes no job twice. All times come from PostgreSQL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from typing import Any
from uuid import UUID

import redis
import structlog
from django.db import close_old_connections, transaction

from rpa_tasks.jobs import schedules
from rpa_tasks.jobs.bulk_publish import BulkPublishCounts
from scheduling import sql
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.ledger.dead_letters import record_unreadable_message

log = structlog.get_logger(__name__)

LEASE = timedelta(seconds=60)  #: of a claim; each batch of jobs renews it
TRIES = 5  #: consecutive failed claims without a stored batch before a failed task is created
MAX_PUBLISH_SECONDS = 3.0  #: seconds after which a pass claims no further round
INFRASTRUCTURE_ERRORS = (*sql.UNAVAILABLE_ERRORS, redis.ConnectionError, redis.TimeoutError)
#: SQLSTATEs of time limits on statements and transactions. The round itself may cause them, so they count as tries.
TIMEOUT_SQLSTATES = {"57014", "25P03"}

#: Rounds whose claim ended with an infrastructure error but still counts as a try.
_uncounted: list[UUID] = []


class LeaseLost(Exception):
    """Another worker has claimed this round."""


@dataclass(frozen=True, slots=True)
class ClaimedRound:
    id: UUID
    lease_no: int
    schedule: str
    due_at: datetime
    args: Any
    kwargs: Any
    position: int
    tries: int  #: claims since `position` last advanced, this one included


def store_round(
    schedule_id: int, schedule: str, due_at: datetime, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Store the round that is due at `due_at`. Idempotent; returns False if it is already stored."""
    given = {
        "id": new_id(), "schedule_id": schedule_id, "schedule": schedule[:200], "due_at": due_at,
        "args": json.dumps(args), "kwargs": json.dumps(kwargs),
    }  # fmt: skip
    return sql.execute(_STORE, given) == 1


def publish_waiting_rounds() -> int:
    """Publish the jobs of rounds that wait or whose worker vanished. Returns the number of rounds that ended.

    Raises: one of `INFRASTRUCTURE_ERRORS` if PostgreSQL or Redis is unavailable. The round's lease brings it back.
    """
    _subtract_uncounted()
    ends_at, ended = monotonic() + MAX_PUBLISH_SECONDS, 0
    while monotonic() < ends_at and (claimed := _claim_round()):
        ended += _publish_claimed(claimed)
    return ended


def _claim_round() -> ClaimedRound | None:
    found = sql.rows(_CLAIM, {"lease": LEASE})
    return ClaimedRound(*found[0]) if found else None


def _publish_claimed(claimed: ClaimedRound) -> bool:
    """Publish one claimed round. Returns False if it must be tried again."""
    if claimed.tries > TRIES:
        _fail_round(claimed, "its worker vanished each time")
        return True

    tries = claimed.tries

    def note(position: int, done: BulkPublishCounts) -> None:
        nonlocal tries
        given = {"id": claimed.id, "lease_no": claimed.lease_no, "position": position, "lease": LEASE}
        counts = {"published": done.published, "waiting": done.waiting, "refused": done.refused}
        if not sql.execute(_NOTE, given | counts):
            raise LeaseLost
        tries = 0

    try:
        order = schedules.keyword_arguments(claimed.args, claimed.kwargs)
        schedules.publish_schedule(order, after=claimed.position, note=note)
    except LeaseLost:
        log.warning("round_lease_lost", id=str(claimed.id))
        return False
    except INFRASTRUCTURE_ERRORS as error:
        if getattr(error.__cause__, "sqlstate", None) not in TIMEOUT_SQLSTATES:
            _uncounted.append(claimed.id)
            close_old_connections()
            with suppress(*sql.UNAVAILABLE_ERRORS):
                _subtract_uncounted()
        raise
    except Exception as error:
        if isinstance(error, InvalidInput) or tries >= TRIES:
            _fail_round(claimed, f"{type(error).__name__}: {error}")
            return True
        log.exception("round_failed", id=str(claimed.id), tries=tries)
        sql.execute(_POSTPONE, {"id": claimed.id, "lease_no": claimed.lease_no})
        return False
    sql.execute(_END, {"id": claimed.id, "lease_no": claimed.lease_no, "state": "done"})
    return True


def _subtract_uncounted() -> None:
    """Subtract claims of this process that ended with an infrastructure error from the tries of their rounds.

    Raises: one of `sql.AWAY` if PostgreSQL is unavailable.
    """
    while _uncounted:
        sql.execute(_SUBTRACT, {"id": _uncounted[-1]})
        _uncounted.pop()


def _fail_round(claimed: ClaimedRound, detail: str) -> None:
    body = {
        "task": "rpa_tasks.publish_for_shops", "schedule": claimed.schedule, "due_at": claimed.due_at.isoformat(),
        "args": claimed.args, "kwargs": claimed.kwargs,
    }  # fmt: skip
    log.error("round_abandoned", id=str(claimed.id), schedule=claimed.schedule, error=detail)
    with transaction.atomic():
        if sql.execute(_END, {"id": claimed.id, "lease_no": claimed.lease_no, "state": "failed"}):
            record_unreadable_message("task_error", body, detail=detail, queue="ticks")


_STORE = """
INSERT INTO rpa_tasks_scheduledround (id, schedule_id, schedule, due_at, args, kwargs, state, position, lease_no,
    tries, next_at, published, waiting, refused, created_at)
VALUES (%(id)s, %(schedule_id)s, %(schedule)s, %(due_at)s, %(args)s::jsonb, %(kwargs)s::jsonb, 'waiting', 0, 0, 0,
    statement_timestamp(), 0, 0, 0, statement_timestamp())
ON CONFLICT (schedule_id, due_at) DO NOTHING
"""

_CLAIM = """
WITH mine AS MATERIALIZED (
    SELECT id FROM rpa_tasks_scheduledround
    WHERE state = 'waiting' AND next_at <= statement_timestamp()
    ORDER BY next_at LIMIT 1 FOR UPDATE SKIP LOCKED
)
UPDATE rpa_tasks_scheduledround AS r
SET lease_no = r.lease_no + 1, tries = r.tries + 1, next_at = statement_timestamp() + %(lease)s
FROM mine WHERE r.id = mine.id
RETURNING r.id, r.lease_no, r.schedule, r.due_at, r.args, r.kwargs, r.position, r.tries
"""

_NOTE = """
UPDATE rpa_tasks_scheduledround
SET position = %(position)s, tries = 0, next_at = statement_timestamp() + %(lease)s,
    published = published + %(published)s,
    waiting = waiting + %(waiting)s, refused = refused + %(refused)s
WHERE id = %(id)s AND state = 'waiting' AND lease_no = %(lease_no)s
"""

_POSTPONE = """
UPDATE rpa_tasks_scheduledround SET next_at = statement_timestamp() + interval '5 seconds' * power(2, tries)
WHERE id = %(id)s AND state = 'waiting' AND lease_no = %(lease_no)s
"""

# Without a fence, because another worker may have claimed the round.
_SUBTRACT = """
UPDATE rpa_tasks_scheduledround SET tries = GREATEST(tries - 1, 0) WHERE id = %(id)s AND state = 'waiting'
"""

_END = """
UPDATE rpa_tasks_scheduledround SET state = %(state)s, ended_at = statement_timestamp()
WHERE id = %(id)s AND state = 'waiting' AND lease_no = %(lease_no)s
"""
