"""Record silences as events of the core, through the same ingest as other events, in bounded transactions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

import structlog
from django.conf import settings
from django.db import DataError, IntegrityError, OperationalError, transaction

from scheduling import sql
from scheduling.batching import halve
from scheduling.configuration.snapshot import current
from scheduling.errors import InvalidInput
from scheduling.ledger.anonymization import read_erasure_times
from scheduling.ledger.locks import locked_users
from scheduling.models import WebhookEvent, WebhookFact
from scheduling.planning.ingest import NewEvent, record_and_publish
from scheduling.webhooks import note_facts
from sessions.detection.presence import SILENT, UNANSWERED
from sessions.store.sessions import ClaimedSilence

log = structlog.get_logger(__name__)


# Bound the transactions of a watcher.
#
# A watcher may freeze inside a transaction (stopped process, suspended machine). PostgreSQL then ends it after
# `IDLE_MS`, so its row locks do not block other programs for longer. No time limit of PostgreSQL applies while a
# `COPY` waits for its data. Another watcher ends such a transaction.


IDLE_MS = 5_000  #: after this idle time in a transaction the server ends it and releases its locks
NAME = "aftertouch watcher"  #: `application_name` within the transaction


@contextmanager
def brief_transaction() -> Iterator[None]:
    with transaction.atomic():
        sql.rows(_LIMITS, {"limit": str(IDLE_MS), "name": NAME})
        yield


def end_frozen_transactions() -> int:
    """End brief transactions whose client has sent nothing for `IDLE_MS` within a statement. Return their number.

    A statement that waits for its client copies at most some hundred rows, which takes milliseconds.
    """
    return sum(row[0] for row in sql.rows(_END_FROZEN, {"limit": IDLE_MS, "name": NAME}))


_LIMITS = """
SELECT set_config('idle_in_transaction_session_timeout', %(limit)s, true),
       set_config('application_name', %(name)s, true)
"""

_END_FROZEN = """
SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND application_name = %(name)s
  AND state = 'active' AND wait_event = 'ClientRead'
  AND query_start < statement_timestamp() - %(limit)s * interval '1 millisecond'
"""


SOURCE = "/sessions"


class RecordedSilences(NamedTuple):
    """The result of `record_silences`. A silence in neither list is rejected by the database permanently."""

    stored: list[ClaimedSilence]
    locked: list[ClaimedSilence]  #: not stored, because another transaction held a lock for too long


class _CustomersErased(Exception):
    """These silences are from before the request of their customers' erasure."""

    def __init__(self, silences: Sequence[ClaimedSilence]) -> None:
        super().__init__()
        self.silences = silences


LONGEST_PASS = 8.0  #: seconds; afterwards no further lock is awaited, well within the lease of the claims


def record_silences(
    silences: Sequence[ClaimedSilence], now_ms: int, ends_at: float | None = None
) -> RecordedSilences:  # fmt: skip
    """Record silences in one transaction. Idempotent: a recorded silence is not recorded again.

    A silence from before the request of its customer's erasure counts as stored and becomes no event.

    A lock is awaited as long as ingest does. Then transactions of frozen watchers are ended, and the silences of
    locked customers are left out. After `ends_at` of the monotonic clock, those that meet a lock are left out.
    """
    ends_at = monotonic() + LONGEST_PASS if ends_at is None else ends_at
    if not silences:
        return RecordedSilences([], [])
    try:
        with brief_transaction():
            receipts = record_and_publish([silence_event(each, now_ms) for each in silences])
            erasures = read_erasure_times(each.user_id for each in silences)
            if erased := [
                each for each in silences if each.user_id in erasures and each.armed <= erasures[each.user_id]
            ]:
                raise _CustomersErased(erased)
            new = [each for each, at in zip(silences, receipts, strict=True) if not at.duplicate]
            note_facts([_silence_fact(each) for each in new if not each.for_agent])
    except _CustomersErased as found:
        rest = record_silences([each for each in silences if each not in found.silences], now_ms, ends_at)
        return RecordedSilences([*rest.stored, *found.silences], rest.locked)
    except (DataError, IntegrityError, InvalidInput) as error:
        if len(silences) == 1:
            log.error("silence_refused", session=silences[0].session_id, error=str(error))
            return RecordedSilences([], [])
        return _record_in_halves(silences, now_ms, ends_at)
    except OperationalError as error:
        if not sql.is_lock_timeout(error):
            raise
        return _record_unlocked(silences, now_ms, ends_at)
    return RecordedSilences(list(silences), [])


def _record_unlocked(silences: Sequence[ClaimedSilence], now_ms: int, ends_at: float) -> RecordedSilences:
    if monotonic() >= ends_at:
        return RecordedSilences([], list(silences))
    if ended := end_frozen_transactions():
        log.warning("frozen_transactions_ended", count=ended)
        return record_silences(silences, now_ms, ends_at)
    users = locked_users(each.user_id for each in silences)
    locked = [each for each in silences if each.user_id in users]
    log.warning("customers_locked", silences=len(locked))
    if locked:
        free = record_silences([each for each in silences if each.user_id not in users], now_ms, ends_at)
        return RecordedSilences(free.stored, free.locked + locked)
    # The lock was released since, or it was on another row. The other silences need not wait for it.
    return _record_in_halves(silences, now_ms, ends_at) if len(silences) > 1 else RecordedSilences([], list(silences))


def _record_in_halves(silences: Sequence[ClaimedSilence], now_ms: int, ends_at: float) -> RecordedSilences:
    first, second = (record_silences(half, now_ms, ends_at) for half in halve(silences))
    return RecordedSilences(first.stored + second.stored, first.locked + second.locked)


def silence_event(silence: ClaimedSilence, now_ms: int) -> NewEvent:
    """Build the event of a silence. Its id names the arming, so that delivery can check whether this silence still
    holds.
    """
    data = {
        "chat_id": silence.chat_id,
        "session_id": silence.session_id,
        "tag": silence.tag,
        "tags": list(silence.tags),
        "policy": silence.policy,
        "policy_version": silence.policy_version,
        "awaited": "agent" if silence.for_agent else "customer",
        "step" if silence.for_agent else "nudge": silence.nudge,
    }
    if (
        not silence.for_agent
        and now_ms - silence.deadline_ms > settings.AFTERTOUCH_SILENCE_STALE.total_seconds() * 1000
    ):
        data["stale"] = True
    return NewEvent(
        source=SOURCE,
        event_id=f"{silence.session_id}:{silence.armed_at}",
        type=UNANSWERED if silence.for_agent else SILENT,
        user_id=silence.user_id,
        chat_id=silence.chat_id,
        occurred_at=silence.deadline,
        data=data,
    )


def _silence_fact(silence: ClaimedSilence) -> WebhookFact:
    data = {
        "session_id": silence.session_id,
        "user_id": silence.user_id,
        "chat_id": silence.chat_id,
        "tags": list(silence.tags),
        "nudge": silence.nudge,
    }
    key = f"session:{silence.session_id}"[:200]
    return WebhookFact(type=WebhookEvent.SESSION_SILENT, object_key=key, at=silence.deadline, data=data)


def count_undelivered(limit: int) -> int:
    """Count due touches for silences that are not yet delivered, up to `limit`."""
    nodes = [node.id for each in (SILENT, UNANSWERED) for node in current().triggered.get(each, ())]
    return int(sql.rows(_UNDELIVERED, {"nodes": nodes, "limit": limit})[0][0]) if nodes else 0


# Both parts read a partial index of current work, not the touches that wait for days.
_UNDELIVERED = """
SELECT count(*) FROM (
    SELECT FROM scheduling_touch_live WHERE state IN ('queued', 'running') AND node_id = ANY(%(nodes)b)
        AND due_at <= statement_timestamp()
    UNION ALL
    SELECT FROM scheduling_touch_live WHERE state = 'scheduled' AND paused_by = '' AND priority IN (0, 1, 2)
        AND due_at <= statement_timestamp() AND node_id = ANY(%(nodes)b)
    LIMIT %(limit)s
) AS undelivered
"""
