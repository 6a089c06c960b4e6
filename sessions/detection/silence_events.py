"""Record silences as events of the core, through the same ingest as other events."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from django.conf import settings
from django.db import DataError, IntegrityError, OperationalError

from scheduling import sql
from scheduling.batching import halve
from scheduling.configuration.snapshot import current
from scheduling.dispatch.dispatcher import background_publisher
from scheduling.errors import InvalidInput
from scheduling.ledger.locks import locked_users
from scheduling.planning.ingest import NewEvent, record_events
from sessions.detection.presence import SILENT
from sessions.store.brief_transaction import brief_transaction
from sessions.store.sessions import ClaimedSilence

log = structlog.get_logger(__name__)

SOURCE = "/sessions"


def record_silences(silences: Sequence[ClaimedSilence], now_ms: int) -> list[ClaimedSilence]:
    """Record silences in one transaction. Idempotent: a recorded silence is not recorded again.

    Returns the silences that the database has now. It leaves out a silence that the database rejects permanently. It
    also leaves out a silence whose customer row is locked for longer than the lock timeout of ingest. The end of the
    claim's lease returns that silence.
    """
    if not silences:
        return []
    try:
        with brief_transaction():
            record_events(
                [silence_event(each, now_ms) for each in silences], publish_wakeups=background_publisher.submit
            )
    except (DataError, IntegrityError, InvalidInput) as error:
        if len(silences) == 1:
            log.error("silence_refused", session=silences[0].session_id, error=str(error))
            return []
        return _record_in_halves(silences, now_ms)
    except OperationalError as error:
        if not sql.is_lock_timeout(error):
            raise
        locked = locked_users(each.user_id for each in silences)
        free = [each for each in silences if each.user_id not in locked]
        log.warning("customers_locked", silences=len(silences) - len(free))
        if len(free) < len(silences):
            return record_silences(free, now_ms)
        # The lock was released since, or it was on another row. The other silences need not wait for their leases.
        return _record_in_halves(silences, now_ms) if len(silences) > 1 else []
    return list(silences)


def _record_in_halves(silences: Sequence[ClaimedSilence], now_ms: int) -> list[ClaimedSilence]:
    return [each for half in halve(silences) for each in record_silences(half, now_ms)]


def silence_event(silence: ClaimedSilence, now_ms: int) -> NewEvent:
    """Build the event of a silence. Its id names the arming, so that delivery can check whether this silence still
    holds.
    """
    data = {
        "chat_id": silence.chat_id,
        "session_id": silence.session_id,
        "tag": silence.tag,
        "nudge": silence.nudge,
    }
    if now_ms - silence.deadline_ms > settings.AFTERTOUCH_SILENCE_STALE.total_seconds() * 1000:
        data["stale"] = True
    return NewEvent(
        source=SOURCE,
        event_id=f"{silence.session_id}:{silence.armed_at}",
        type=SILENT,
        user_id=silence.user_id,
        chat_id=silence.chat_id,
        occurred_at=silence.deadline,
        data=data,
    )


def count_undelivered(limit: int) -> int:
    """Count due touches for silences that are not yet delivered, up to `limit`."""
    nodes = [node.id for node in current().triggered.get(SILENT, ())]
    return int(sql.rows(_UNDELIVERED, {"nodes": nodes, "limit": limit})[0][0]) if nodes else 0


# Both parts read a partial index of current work, not the touches that wait for days.
_UNDELIVERED = """
SELECT count(*) FROM (
    SELECT FROM scheduling_touch WHERE state IN ('queued', 'running') AND node_id = ANY(%(nodes)b)
        AND due_at <= statement_timestamp()
    UNION ALL
    SELECT FROM scheduling_touch WHERE state = 'scheduled' AND parked = '' AND node_id = ANY(%(nodes)b)
        AND due_at <= statement_timestamp()
    LIMIT %(limit)s
) AS undelivered
"""
