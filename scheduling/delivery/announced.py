"""Read the touches that a message names and ask Presence about them, before any lock and any transaction.

A touch keeps its event, node and customer, and an event never changes. A batch therefore reads each event once, here.
What can change is read with the lock (see `due_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from json import JSONDecoder
from typing import Any, NamedTuple
from uuid import UUID

from scheduling import sql
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery import presence
from scheduling.delivery.presence import PresenceQuestion
from scheduling.policy.specs import EventSpec

MOST_BYTES = 16 * 1024 * 1024  #: event data per batch

_parse = JSONDecoder().raw_decode  # psycopg's way through `json.loads` takes three times as long


class AnnouncedTouch(NamedTuple):
    """What never changes about a touch that has not ended."""

    customer_id: int
    node_id: int
    root_id: UUID | None  #: None: the touch's own id
    republished: bool
    planned_at: datetime  #: may change, but only Presence uses it
    readable: bool  #: False: its event data is too large for this batch and was left out
    event: EventSpec


class Announcement(NamedTuple):
    """The touches of one message that have not ended, and the answers of the presence providers."""

    touches: dict[UUID, AnnouncedTouch]
    questions: dict[UUID, PresenceQuestion]
    presence_blocks: dict[UUID, str]  #: why providers block some of them


def read_announced(task_ids: Sequence[UUID], config: Snapshot) -> Announcement:
    """Read the touches with their events and ask the presence providers about them."""
    touches = load_announced(task_ids, most_bytes=MOST_BYTES)
    questions = presence_questions(touches, config)
    answers = presence.presence_blocks(list(questions.values()))
    blocks = {task_id: answer for task_id, answer in zip(questions, answers, strict=True) if answer}
    return Announcement(touches, questions, blocks)


def load_announced(task_ids: Sequence[UUID], *, most_bytes: int) -> dict[UUID, AnnouncedTouch]:
    """Return the touches among `task_ids` that have not ended, with their events.

    Once the event data reaches `most_bytes`, that of less important touches is left out. One touch is always readable.

    A touch that runs now is among them: it may be waiting again before the lock.
    """
    rows = sql.rows(ANNOUNCE_STATEMENT, {"ids": sql.UuidArray(task_ids), "most_bytes": most_bytes})
    return {row[0]: AnnouncedTouch._make((*row[1:7], _build_event(*row[7:]))) for row in rows}


def _build_event(*row: Any) -> EventSpec:
    data = row[7]
    return EventSpec._make((*row[:7], _parse(data)[0] if data else {}, row[8]))


def presence_questions(touches: dict[UUID, AnnouncedTouch], config: Snapshot) -> dict[UUID, PresenceQuestion]:
    """Return the presence questions about these touches.

    Asked are touches whose node respects conversations, and touches whose event belongs to a provider. The sender asks
    again right before it sends them.
    """
    if not presence.presence_providers():
        return {}
    asking, types = config.asking_presence, presence.provider_event_types()
    return {
        task_id: PresenceQuestion(
            event.user_id, event.chat_id, event.type, event.event_id, event.occurred_at, planned_at
        )
        for task_id, (_, node_id, _, _, planned_at, _, event) in touches.items()
        if node_id in asking or event.type in types
    }


# The size of compressed data is estimated from the stored size, because reading it costs as much as returning it. Text
# of one repeated letter, the extreme, expands 85 times under pglz and 250 times under lz4; ordinary JSON 3 to 10 times.
ANNOUNCE_STATEMENT = """
WITH announced AS MATERIALIZED (
    SELECT task_id, customer_id, node_id, NULLIF(root_id, task_id) AS root_id, retry_of IS NOT NULL AS republished,
           planned_at, priority, due_at, event_id
    FROM scheduling_touch_live
    WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued', 'running')
), sized AS (
    SELECT a.*, e.id, e.source, e.event_id AS key, e.type, e.occurred_at, e.user_id, e.chat_id, e.data, e.trace_id,
           COALESCE(sum(pg_column_size(e.data) * CASE WHEN pg_column_compression(e.data) IS NULL THEN 1 ELSE 64 END)
                    OVER (ORDER BY a.priority, a.due_at ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)
               < %(most_bytes)s::bigint AS readable
    FROM announced AS a JOIN scheduling_event AS e ON e.id = a.event_id
)
SELECT task_id, customer_id, node_id, root_id, republished, planned_at, readable,
       id, source, key, type, occurred_at, user_id, chat_id, CASE WHEN readable THEN data::text END, trace_id
FROM sized
"""
