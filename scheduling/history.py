"""What delivery reads for a batch, each in one statement: who, what, and what they were sent before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from django.conf import settings

from scheduling import presence, sql
from scheduling.configuration import Snapshot
from scheduling.guard import Slot
from scheduling.ledger import Claim
from scheduling.specs import CustomerSpec, EventSpec
from scheduling.touches import touches


@dataclass(frozen=True, slots=True)
class Due:
    """A touch that is locked and will be claimed, with its event."""

    claim: Claim  #: with the number that the row has once the verdict is written
    attempt: int
    root_id: UUID
    node_id: int
    customer_id: int
    priority: int
    due_at: datetime
    expires_at: datetime
    reserved_at: datetime | None
    template_id: int | None
    is_repeat: bool  #: of an attempt or of another touch
    event: EventSpec


@dataclass(slots=True)
class History:
    """Slots by customer and by community, what is about to fall due for a customer: (priority, due_at), by touch the
    reason for which an event called it off while a worker had it, and touches of which an earlier attempt may have had
    its effect."""

    slots: dict[int, list[Slot]] = field(default_factory=dict)
    community_slots: dict[str, list[Slot]] = field(default_factory=dict)
    important: dict[int, list[tuple[int, datetime]]] = field(default_factory=dict)
    called_off: dict[UUID, str] = field(default_factory=dict)
    in_doubt: set[UUID] = field(default_factory=set)

    def take(self, row: Due, slot: Slot) -> None:
        """The rest of the batch sees it."""
        self.slots.setdefault(row.customer_id, []).append(slot)
        if row.event.chat_id:
            self.community_slots.setdefault(row.event.chat_id, []).append(slot)


def objections(task_ids: Sequence[UUID]) -> dict[UUID, str]:
    """What Presence says, asked before the transaction: it lives outside the database."""
    if not settings.PRESENCE:
        return {}
    asked = [(task_id, presence.Question(*rest)) for task_id, *rest in sql.rows(_QUESTIONS, {"ids": list(task_ids)})]
    answers = presence.objections([question for _, question in asked])
    return {task_id: answer for (task_id, _), answer in zip(asked, answers, strict=True)}


def lock_customers(task_ids: Sequence[UUID]) -> dict[int, CustomerSpec]:
    """Lock the customers of these touches in the order of their ids, as every writer does."""
    rows = sql.rows(_LOCK_CUSTOMERS, {"ids": list(task_ids)})
    return {row[0]: CustomerSpec(*row) for row in rows}


def lock_communities(task_ids: Sequence[UUID]) -> None:
    """Where a community cap is on: the communities too, after the customers. Unknown ones get a row to lock."""
    sql.count(_INSERT_COMMUNITIES, {"ids": list(task_ids)})
    sql.rows(_LOCK_COMMUNITIES, {"ids": list(task_ids)})


def lock_due(task_ids: Sequence[UUID]) -> tuple[list[Due], datetime | None]:
    """Lock those of `task_ids` that are due, waiting and in nobody's hands; and when that was, by the database's clock.

    The rows stay as they are until `TouchLedger.decide` writes claim and verdict at once: each write of a row costs as
    much as everything else that is done about it. Until then the lock is the claim.
    """
    rows = sql.rows(_LOCK_DUE, {"ids": list(task_ids)})
    due = [Due(Claim(row[0], row[1]), *row[2:12], EventSpec(*row[12:21])) for row in rows]  # type: ignore[call-arg]
    return due, rows[0][21] if rows else None


def load(due: Sequence[Due], config: Snapshot) -> History:
    """What these customers (and communities) were sent within the rules' windows. Call it after the locks."""
    history = History()
    customers = sorted({row.customer_id for row in due})
    chats = sorted({row.event.chat_id for row in due if row.event.chat_id})
    _load_slots(history, customers, chats if config.counts_communities else [], config)
    lowest = max(row.priority for row in due)
    if lowest > 0 and settings.AFTERTOUCH_SLOT_HOLD and any(rule.kind == "cap" for rule in config.rules):
        _load_important(history, due, lowest, config)
    _load_called_off(history, due, config)
    _load_doubts(history, due)
    return history


def of_customer(customer_id: int, chat_id: str, config: Snapshot) -> History:
    """The same for one customer, without a touch at hand."""
    history = History()
    _load_slots(history, [customer_id], [chat_id] if chat_id else [], config)
    return history


def _load_slots(history: History, customers: list[int], chats: list[str], config: Snapshot) -> None:
    if config.window:
        for customer_id, *slot in sql.rows(_SLOTS, {"customers": customers, "window": config.window}):
            history.slots.setdefault(customer_id, []).append(Slot(*slot))
    if chats:
        for chat_id, *slot in sql.rows(_COMMUNITY_SLOTS, {"chats": chats, "window": config.window}):
            history.community_slots.setdefault(chat_id, []).append(Slot(*slot))


def _load_important(history: History, due: Sequence[Due], lowest: int, config: Snapshot) -> None:
    """What the same batch judges is no part of it: it is judged before and takes its slot."""
    judged = {row.claim.task_id for row in due}
    customers = sorted({row.customer_id for row in due})
    counting = [node.id for node in config.nodes.values() if node.enabled and node.guard_cap != "ignore"]
    waiting = sql.rows(
        _IMPORTANT,
        {"customers": customers, "lowest": lowest, "hold": settings.AFTERTOUCH_SLOT_HOLD, "nodes": counting},
    )
    for task_id, customer_id, priority, due_at in waiting:
        if task_id not in judged:
            history.important.setdefault(customer_id, []).append((priority, due_at))


def _load_called_off(history: History, due: Sequence[Due], config: Snapshot) -> None:
    """`cancel_on` and `on_repeat` cannot reach a touch that a worker has. Where that one gave it back, it is found out
    now; a touch that is claimed for the first time has always been within reach."""
    again = [(row.claim.task_id, config.nodes[row.node_id]) for row in due if row.claim.lease_no > 1]
    revoking = [(task_id, kind) for task_id, node in again for kind in sorted(node.cancel_on)]
    if revoking:
        parameters = {"ids": [task_id for task_id, _ in revoking], "types": [kind for _, kind in revoking]}
        history.called_off.update(sql.rows(_CALLED_OFF, parameters))
    restarting = [task_id for task_id, node in again if node.on_repeat == "restart"]
    if restarting:
        history.called_off.update(sql.rows(_RESTARTED, {"ids": restarting}))


def _load_doubts(history: History, due: Sequence[Due]) -> None:
    repeated = [row.claim.task_id for row in due if row.is_repeat]
    if repeated:
        history.in_doubt = touches.in_doubt(repeated)


_QUESTIONS = """
SELECT t.task_id, e.user_id, e.chat_id, e.type, e.event_id, e.occurred_at, t.planned_at
FROM scheduling_touch AS t JOIN scheduling_event AS e ON e.id = t.event_id
WHERE t.task_id = ANY(%(ids)b) AND t.state IN ('scheduled', 'queued', 'running')
"""

# A touch that is running now may be back in the table before the claim, so its customer is locked as well (and
# Presence asked about it): nothing is claimed whose customer is not.
_LOCK_CUSTOMERS = """
SELECT id, user_id, name, level, locale, timezone, opted_out, last_active_at, conversation_at, addresses
FROM scheduling_customer WHERE id IN (
    SELECT customer_id FROM scheduling_touch
    WHERE task_id = ANY(%(ids)b) AND state IN ('scheduled', 'queued', 'running')
)
ORDER BY id FOR NO KEY UPDATE
"""

_INSERT_COMMUNITIES = """
INSERT INTO scheduling_community (chat_id, name, targets)
SELECT DISTINCT t.chat_id, '', '' FROM scheduling_touch AS t
WHERE t.task_id = ANY(%(ids)b) AND t.chat_id <> ''
  AND NOT EXISTS (SELECT 1 FROM scheduling_community AS c WHERE c.chat_id = t.chat_id)
ORDER BY t.chat_id
ON CONFLICT (chat_id) DO NOTHING
"""

_LOCK_COMMUNITIES = """
SELECT id FROM scheduling_community
WHERE chat_id IN (SELECT chat_id FROM scheduling_touch WHERE task_id = ANY(%(ids)b) AND chat_id <> '')
ORDER BY chat_id FOR NO KEY UPDATE
"""

# States are literal, as in the ledger. It waits for nobody, so it needs no order.
_LOCK_DUE = """
WITH due AS MATERIALIZED (
    SELECT * FROM scheduling_touch
    WHERE task_id = ANY(%(ids)b) AND state IN ('scheduled', 'queued') AND parked = ''
      AND due_at <= statement_timestamp()
    FOR NO KEY UPDATE SKIP LOCKED
)
SELECT due.task_id, due.lease_no + 1, due.attempt, due.root_id, due.node_id, due.customer_id, due.priority, due.due_at,
       due.expires_at, due.reserved_at, due.template_id, due.attempt > 0 OR due.retry_of IS NOT NULL,
       e.id, e.source, e.event_id, e.type, e.occurred_at, e.user_id, e.chat_id, e.data,
       COALESCE(e.trace_id, e.id), statement_timestamp()
FROM due JOIN scheduling_event AS e ON e.id = due.event_id
"""

_SLOTS = """
SELECT customer_id, task_id, reserved_at, content_type, counts_toward_cap,
       state NOT IN ('scheduled', 'queued', 'running'), COALESCE(lease_until, due_at)
FROM scheduling_touch
WHERE customer_id = ANY(%(customers)b) AND reserved_at IS NOT NULL
  AND reserved_at > statement_timestamp() - %(window)s
"""

_COMMUNITY_SLOTS = """
SELECT chat_id, task_id, reserved_at, content_type, counts_toward_cap,
       state NOT IN ('scheduled', 'queued', 'running'), COALESCE(lease_until, due_at)
FROM scheduling_touch
WHERE chat_id = ANY(%(chats)b) AND chat_id <> '' AND reserved_at IS NOT NULL
  AND reserved_at > statement_timestamp() - %(window)s
"""

_CALLED_OFF = """
SELECT t.task_id, 'event:' || min(later.type)
FROM unnest(%(ids)b::uuid[], %(types)b::text[]) AS v(task_id, type)
JOIN scheduling_touch AS t USING (task_id)
JOIN scheduling_event AS e ON e.id = t.event_id
JOIN scheduling_event AS later ON later.customer_id = t.customer_id AND later.type = v.type
    AND later.occurred_at >= e.occurred_at AND later.received_at > t.created_at
WHERE later.id <> e.id
GROUP BY t.task_id
"""

# The touch that a newer event planned in its place: through the events, as ended touches have no index by node.
_RESTARTED = """
SELECT t.task_id, 'restarted:' || min(later.type)
FROM scheduling_touch AS t
JOIN scheduling_event AS e ON e.id = t.event_id
JOIN scheduling_event AS later ON later.customer_id = t.customer_id AND later.type = e.type AND later.id <> e.id
JOIN scheduling_touch AS newer ON newer.event_id = later.id AND newer.node_id = t.node_id
    AND newer.retry_of IS NULL AND newer.created_at > t.created_at
WHERE t.task_id = ANY(%(ids)b)
GROUP BY t.task_id
"""

_IMPORTANT = """
SELECT task_id, customer_id, priority, due_at FROM scheduling_touch
WHERE customer_id = ANY(%(customers)b) AND state IN ('scheduled', 'queued') AND parked = ''
  AND priority < %(lowest)s AND due_at <= statement_timestamp() + %(hold)s
  AND reserved_at IS NULL AND node_id = ANY(%(nodes)b)
"""
