"""Lock the due touches of a batch and load what judging needs: events, cap slots, cancellations, first attempts.

Each kind of data takes one statement per batch. The customers are locked first, sorted. Their history is counted in a
later statement than the lock: a count in the locking statement uses the snapshot from before the wait. That granted 32
messages of a cap of 3.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings

from scheduling import sql
from scheduling.configuration.snapshot import Snapshot, sort_texts
from scheduling.delivery import presence
from scheduling.delivery.routing import Route, find_disabled_targets, load_community_targets
from scheduling.ledger import locks
from scheduling.ledger.touches import Due, touches
from scheduling.ledger.transitions import WakeUp
from scheduling.planning.disabled_targets import Target
from scheduling.policy.guards import Candidate, CapSlot, GuardContext
from scheduling.policy.specs import CustomerSpec, TemplateSpec, TextSpec, template_for

MOST_BYTES = 16 * 1024 * 1024  #: event data per batch


@dataclass(frozen=True, slots=True)
class FirstAttempt:
    """The content of the first attempt under a delivery key. A retry under the same key sends the same content."""

    template_id: int
    version: int  #: version of the template
    subject: str
    body: str  #: empty: the worker was lost before it stored one
    texts: tuple[TextSpec, ...]  #: texts of the template when a lost attempt was judged; empty if unknown

    def pin(self, present: TemplateSpec) -> TemplateSpec:
        """Return the template as this attempt used it, as far as that is known."""
        if self.version == present.version:
            return present
        if self.body:
            return replace(present, version=self.version)
        return replace(present, version=self.version, texts=self.texts) if self.texts else present


@dataclass(slots=True)
class CustomerHistory:
    """What the guards consider about the customers and touches of a batch.

    `slots` and `community_slots` hold cap slots by customer and by community. `important` holds (priority, due_at) of
    touches that soon fall due for a customer. `cancelled_by` holds the reason of an event that cancelled a touch while
    a worker held it. `with_unknown_outcome` holds the touches with an earlier attempt of unknown outcome.
    `first_attempts` holds the content to repeat.
    """

    slots: dict[int, list[CapSlot]] = field(default_factory=dict)
    community_slots: dict[str, list[CapSlot]] = field(default_factory=dict)
    important: dict[int, list[tuple[int, datetime]]] = field(default_factory=dict)
    cancelled_by: dict[UUID, str] = field(default_factory=dict)
    with_unknown_outcome: set[UUID] = field(default_factory=set)
    first_attempts: dict[UUID, FirstAttempt] = field(default_factory=dict)

    def add_slot(self, row: Due, slot: CapSlot) -> None:
        """Add a slot that the rest of the batch counts."""
        self.slots.setdefault(row.customer_id, []).append(slot)
        if row.event.chat_id:
            self.community_slots.setdefault(row.event.chat_id, []).append(slot)


@dataclass(frozen=True, slots=True)
class PresenceAnswers:
    """The presence questions about touches, and why providers block some of them."""

    questions: dict[UUID, presence.PresenceQuestion]
    blocks: dict[UUID, str]


@dataclass(frozen=True, slots=True)
class DueBatch:
    """The locked touches of one message, with all that judging needs."""

    config: Snapshot
    presence: PresenceAnswers
    due: list[Due]
    rest: list[WakeUp]  #: left to the next batch, because their event data is too large for this one
    locked_at: datetime  #: by PostgreSQL's clock
    clock: float  #: monotonic clock of this process just before `locked_at`
    customers: dict[int, CustomerSpec]
    history: CustomerHistory
    communities: Mapping[str, Mapping[str, Any]]
    disabled: set[Target]
    routes: Mapping[UUID, Route] = field(default_factory=dict)  #: of touches that admission has routed

    def instant(self, monotonic: float) -> datetime:
        """Convert a monotonic time to PostgreSQL's time."""
        return self.locked_at + timedelta(seconds=monotonic - self.clock)

    def candidate(self, row: Due) -> Candidate:
        node = self.config.nodes[row.node_id]
        first = self.history.first_attempts.get(row.claim.task_id)
        template_id = first.template_id if first else row.template_id
        kept = self.config.templates.get(template_id) if template_id else None
        if first and kept:
            kept = first.pin(kept)
        return Candidate(
            task_id=row.claim.task_id,
            node=node,
            customer=self.customers[row.customer_id],
            template=kept or template_for(node, row.event.chat_id, row.event.user_id),
            chat_id=row.event.chat_id,
            event_at=row.event.occurred_at,
            expires_at=row.expires_at,
            has_slot=row.reserved_at is not None,
        )

    def surroundings(self, row: Due) -> GuardContext:
        history = self.history
        return GuardContext(
            rules=self.config.rules,
            paused=self.config.paused,
            slots=history.slots.get(row.customer_id, ()),
            community_slots=history.community_slots.get(row.event.chat_id, ()),
            important=[at for level, at in history.important.get(row.customer_id, ()) if level < row.priority],
            cancelled_by=history.cancelled_by.get(row.claim.task_id, ""),
            presence_block=self.presence.blocks.get(row.claim.task_id, ""),
        )


def lock(task_ids: Sequence[UUID], config: Snapshot, answers: PresenceAnswers) -> DueBatch | None:
    """Lock customers, communities and due touches, then load their history. Return None if no touch is due.

    Call it in a transaction. It makes no external call.
    """
    customers = locks.lock_customers(task_ids)
    if config.counts_communities:
        locks.lock_communities(task_ids)
    clock = time.monotonic()
    due, rest, locked_at = touches.lock_due(task_ids, most_bytes=MOST_BYTES)
    if locked_at is None:
        return None
    communities = load_community_targets(row.event.chat_id for row in due)
    wanted = ((config.nodes[row.node_id].channel, customers[row.customer_id], row.event.chat_id) for row in due)
    return DueBatch(
        config, answers, due, rest, locked_at, clock, customers, load_history(due, config), communities,
        find_disabled_targets(wanted, communities),
    )  # fmt: skip


def ask_presence(task_ids: Sequence[UUID], config: Snapshot) -> PresenceAnswers:
    """Ask the presence providers. Call it before the transaction, because they are outside PostgreSQL."""
    asked = presence_questions(task_ids, config)
    answers = presence.presence_blocks(list(asked.values()))
    return PresenceAnswers(asked, {task_id: answer for task_id, answer in zip(asked, answers, strict=True) if answer})


def presence_questions(task_ids: Sequence[UUID], config: Snapshot) -> dict[UUID, presence.PresenceQuestion]:
    """Return the presence questions about these touches.

    Asked are touches whose node respects conversations, and touches whose event belongs to a provider. Only an inline
    delivery is sent right after this question. The sender asks again about all others.
    """
    if not settings.PRESENCE:
        return {}
    asked = sql.rows(
        _QUESTIONS,
        {
            "ids": list(task_ids),
            "nodes": list(config.asking_presence),
            "inline": list(config.delivering_inline),
            "types": presence.provider_event_types(),
        },
    )
    return {task_id: presence.PresenceQuestion(*rest) for task_id, *rest in asked}


def load_history(due: Sequence[Due], config: Snapshot) -> CustomerHistory:
    """Load the history of these customers and communities within the windows of the rules. Call it after the locks."""
    history = CustomerHistory()
    customers = sorted({row.customer_id for row in due})
    chats = sorted({row.event.chat_id for row in due if row.event.chat_id})
    _load_slots(history, customers, chats if config.counts_communities else [], config)
    lowest = max(row.priority for row in due)
    if lowest > 0 and settings.AFTERTOUCH_SLOT_HOLD and any(rule.kind == "cap" for rule in config.rules):
        _load_important(history, due, lowest, config)
    _load_cancellations(history, due, config)
    _load_retries(history, due)
    return history


def load_customer_history(customer_id: int, chat_id: str, config: Snapshot) -> CustomerHistory:
    """Load the cap slots of one customer and community without a touch."""
    history = CustomerHistory()
    _load_slots(history, [customer_id], [chat_id] if chat_id else [], config)
    return history


def _load_slots(history: CustomerHistory, customers: list[int], chats: list[str], config: Snapshot) -> None:
    if config.window:
        for customer_id, *slot in sql.rows(_SLOTS, {"customers": customers, "window": config.window}):
            history.slots.setdefault(customer_id, []).append(CapSlot(*slot))
    if chats:
        for chat_id, *slot in sql.rows(_COMMUNITY_SLOTS, {"chats": chats, "window": config.window}):
            history.community_slots.setdefault(chat_id, []).append(CapSlot(*slot))


def _load_important(history: CustomerHistory, due: Sequence[Due], lowest: int, config: Snapshot) -> None:
    """Load more important touches that soon fall due.

    Touches of this batch are left out: they are judged first and take their slots.
    """
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


def _load_cancellations(history: CustomerHistory, due: Sequence[Due], config: Snapshot) -> None:
    """Load cancellations that happened while a worker held the touch.

    `cancel_on` and `on_repeat` cannot cancel a touch that a worker holds. A touch that its worker released is therefore
    checked here. A touch at its first claim needs no check: events could always cancel it.
    """
    again = [(row.claim.task_id, config.nodes[row.node_id]) for row in due if row.claim.lease_no > 1]
    revoking = [(task_id, kind) for task_id, node in again for kind in sorted(node.cancel_on)]
    if revoking:
        parameters = {"ids": [task_id for task_id, _ in revoking], "types": [kind for _, kind in revoking]}
        history.cancelled_by.update(sql.rows(_CALLED_OFF, parameters))
    restarting = [task_id for task_id, node in again if node.on_repeat == "restart"]
    if restarting:
        history.cancelled_by.update(sql.rows(_RESTARTED, {"ids": restarting}))


def _load_retries(history: CustomerHistory, due: Sequence[Due]) -> None:
    repeated = [row.claim.task_id for row in due if row.is_retry]
    if repeated:
        history.with_unknown_outcome = touches.with_unknown_outcome(repeated)
        for task_id, template_id, version, subject, body, *texts in sql.rows(_FIRST_ATTEMPTS, {"ids": repeated}):
            stored = sort_texts(TextSpec(*text) for text in zip(*(each or () for each in texts), strict=True))
            history.first_attempts[task_id] = FirstAttempt(template_id, version, subject, body, stored)


_QUESTIONS = """
WITH t AS MATERIALIZED (
    SELECT task_id, event_id, node_id, planned_at, due_at, parked FROM scheduling_touch
    WHERE task_id = ANY(%(ids)b) AND COALESCE(state, '') IN ('scheduled', 'queued', 'running')
)
SELECT t.task_id, e.user_id, e.chat_id, e.type, e.event_id, e.occurred_at, t.planned_at,
    t.node_id = ANY(%(inline)b::bigint[]) AND t.due_at <= statement_timestamp() AND t.parked = ''
FROM t JOIN scheduling_event AS e ON e.id = t.event_id
WHERE (t.node_id = ANY(%(nodes)b::bigint[]) OR e.type = ANY(%(types)b::text[]))
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

# The touch that a newer event planned instead. Joined through events, because ended touches have no index by node.
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
  AND reserved_at IS NULL AND COALESCE(node_id, 0) = ANY(%(nodes)b)
"""

# `retry_of` links touches that share a delivery key. An attempt with a body precedes a lost one: after a lost first
# attempt, the second one sent the same content. For a lost attempt only the text valid at its verdict is known.
_FIRST_ATTEMPTS = """
WITH RECURSIVE chain AS (
    SELECT task_id, task_id AS link, root_id, retry_of, template_id, template_version
    FROM scheduling_touch WHERE task_id = ANY(%(ids)b)
    UNION ALL
    SELECT chain.task_id, t.task_id, t.root_id, t.retry_of, t.template_id, t.template_version
    FROM chain JOIN scheduling_touch AS t ON t.task_id = chain.retry_of AND t.root_id = chain.root_id
), first AS MATERIALIZED (
    SELECT DISTINCT ON (chain.task_id) chain.task_id, chain.link, chain.template_id, chain.template_version,
           a.subject, a.body, a.started_at
    FROM chain JOIN scheduling_attempt AS a ON a.touch_id = chain.link
    WHERE chain.template_id IS NOT NULL AND chain.template_version IS NOT NULL
    ORDER BY chain.task_id, a.body = '', a.id
)
SELECT first.task_id, first.template_id, first.template_version, first.subject, first.body,
       texts.locales, texts.subjects, texts.bodies
FROM first LEFT JOIN LATERAL (
    SELECT array_agg(stood.locale) AS locales, array_agg(stood.subject) AS subjects, array_agg(stood.body) AS bodies
    FROM (
        SELECT DISTINCT ON (h.id) h.history_type, h.locale, h.subject, h.body
        FROM scheduling_historicaltemplatetext AS h
        WHERE h.template_id = first.template_id AND h.history_date <= (
            SELECT max(v.at) FROM scheduling_verdict AS v
            WHERE v.touch_id = first.link AND v.decision = 'send' AND v.at <= first.started_at
        )
        ORDER BY h.id, h.history_date DESC, h.history_id DESC
    ) AS stood
    WHERE stood.history_type <> '-'
) AS texts ON first.body = ''
"""
