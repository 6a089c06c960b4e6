"""Store scheduled publications as rows, which workers claim and publish.

Beat stores a publication before it publishes a wake-up message. If the message or its worker is lost, the pass
`rpa_tasks.rescue` claims the publication. Each batch of jobs and the position behind it are stored in one transaction,
fenced by `lease_no`. A repeated publication therefore publishes no job twice. All times come from PostgreSQL.
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

import structlog
from django.db import close_old_connections, transaction

from rpa_tasks.jobs import schedules
from rpa_tasks.jobs.bulk_publish import BulkPublishCounts
from scheduling import sql
from scheduling.errors import InvalidInput
from scheduling.ids import new_id
from scheduling.ledger.dead_letters import record_unreadable_message
from scheduling.redis_client import UNREACHABLE_ERRORS

log = structlog.get_logger(__name__)

LEASE = timedelta(seconds=60)  #: of a claim; each batch of jobs renews it
TRIES = 5  #: consecutive failed claims without a stored batch before a failed task is created
MAX_PUBLISH_SECONDS = 3.0  #: seconds after which a pass claims no further publication
INFRASTRUCTURE_ERRORS = (*sql.UNAVAILABLE_ERRORS, *UNREACHABLE_ERRORS)
#: SQLSTATEs of time limits on statements and transactions. The work itself may cause them, so they count as tries.
TIMEOUT_SQLSTATES = {"57014", "25P03"}

#: Publications whose claim ended with an infrastructure error but still counts as a try.
_uncounted: list[UUID] = []


class LeaseLost(Exception):
    """Another worker has claimed this publication."""


@dataclass(frozen=True, slots=True)
class ClaimedPublication:
    id: UUID
    lease_no: int
    schedule: str
    due_at: datetime
    args: Any
    kwargs: Any
    position: int
    tries: int  #: claims since `position` last advanced, this one included


def store_publication(
    schedule_id: int, schedule: str, due_at: datetime, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Store the publication that is due at `due_at`. Idempotent; returns False if it is already stored."""
    given = {
        "id": new_id(), "schedule_id": schedule_id, "schedule": schedule[:200], "due_at": due_at,
        "args": json.dumps(args), "kwargs": json.dumps(kwargs),
    }  # fmt: skip
    return sql.execute(_STORE, given) == 1


def run_waiting_publications() -> int:
    """Publish the jobs of publications that wait or whose worker vanished. Returns how many publications ended.

    Raises: one of `INFRASTRUCTURE_ERRORS` if PostgreSQL or Redis is unavailable. The lease brings the row back.
    """
    _subtract_uncounted()
    ends_at, ended = monotonic() + MAX_PUBLISH_SECONDS, 0
    while monotonic() < ends_at and (claimed := claim_publication()):
        ended += publish_claimed(claimed)
    return ended


def claim_publication() -> ClaimedPublication | None:
    """Claim the publication that waits longest. Of concurrent workers one gets it."""
    found = sql.rows(_CLAIM, {"lease": LEASE})
    return ClaimedPublication(*found[0]) if found else None


def publish_claimed(claimed: ClaimedPublication) -> bool:
    """Publish the jobs of one claim. Returns False if it must be tried again."""
    if claimed.tries > TRIES:
        _fail_publication(claimed, "its worker vanished each time")
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
        schedules.publish_schedule(order, due_at=claimed.due_at, after=claimed.position, note=note)
    except LeaseLost:
        log.warning("publication_lease_lost", id=str(claimed.id))
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
            _fail_publication(claimed, f"{type(error).__name__}: {error}")
            return True
        log.exception("publication_failed", id=str(claimed.id), tries=tries)
        sql.execute(_POSTPONE, {"id": claimed.id, "lease_no": claimed.lease_no})
        return False
    sql.execute(_END, {"id": claimed.id, "lease_no": claimed.lease_no, "state": "done"})
    return True


def _subtract_uncounted() -> None:
    """Subtract claims of this process that ended with an infrastructure error from the tries of their publications.

    Raises: one of `sql.UNAVAILABLE_ERRORS` if PostgreSQL is unavailable.
    """
    while _uncounted:
        sql.execute(SUBTRACT_STATEMENT, {"id": _uncounted[-1]})
        _uncounted.pop()


def _fail_publication(claimed: ClaimedPublication, detail: str) -> None:
    body = {
        "task": "rpa_tasks.publish_for_shops", "schedule": claimed.schedule, "due_at": claimed.due_at.isoformat(),
        "args": claimed.args, "kwargs": claimed.kwargs,
    }  # fmt: skip
    log.error("publication_abandoned", id=str(claimed.id), schedule=claimed.schedule, error=detail)
    with transaction.atomic():
        if sql.execute(_END, {"id": claimed.id, "lease_no": claimed.lease_no, "state": "failed"}):
            record_unreadable_message("task_error", body, detail=detail, queue="ticks")


_STORE = """
INSERT INTO rpa_tasks_scheduledpublication (id, schedule_id, schedule, due_at, args, kwargs, state, position, lease_no,
    tries, next_at, published, waiting, refused, created_at)
VALUES (%(id)s, %(schedule_id)s, %(schedule)s, %(due_at)s, %(args)s::jsonb, %(kwargs)s::jsonb, 'waiting', 0, 0, 0,
    statement_timestamp(), 0, 0, 0, statement_timestamp())
ON CONFLICT (schedule_id, due_at) DO NOTHING
"""

_CLAIM = """
WITH mine AS MATERIALIZED (
    SELECT id FROM rpa_tasks_scheduledpublication
    WHERE state = 'waiting' AND next_at <= statement_timestamp()
    ORDER BY next_at LIMIT 1 FOR UPDATE SKIP LOCKED
)
UPDATE rpa_tasks_scheduledpublication AS r
SET lease_no = r.lease_no + 1, tries = r.tries + 1, next_at = statement_timestamp() + %(lease)s
FROM mine WHERE r.id = mine.id
RETURNING r.id, r.lease_no, r.schedule, r.due_at, r.args, r.kwargs, r.position, r.tries
"""

_NOTE = """
UPDATE rpa_tasks_scheduledpublication
SET position = %(position)s, tries = 0, next_at = statement_timestamp() + %(lease)s,
    published = published + %(published)s,
    waiting = waiting + %(waiting)s, refused = refused + %(refused)s
WHERE id = %(id)s AND state = 'waiting' AND lease_no = %(lease_no)s
"""

_POSTPONE = """
UPDATE rpa_tasks_scheduledpublication SET next_at = statement_timestamp() + interval '5 seconds' * power(2, tries)
WHERE id = %(id)s AND state = 'waiting' AND lease_no = %(lease_no)s
"""

# Without a fence, because another worker may have claimed the publication.
SUBTRACT_STATEMENT = """
UPDATE rpa_tasks_scheduledpublication SET tries = GREATEST(tries - 1, 0) WHERE id = %(id)s AND state = 'waiting'
"""

_END = """
UPDATE rpa_tasks_scheduledpublication SET state = %(state)s, ended_at = statement_timestamp()
WHERE id = %(id)s AND state = 'waiting' AND lease_no = %(lease_no)s
"""
