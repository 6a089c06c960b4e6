"""Read the touches of a message, lock those that are due, and load what judging needs.

An event never changes, and a touch keeps its event, node and customer. So the events are read, and Presence is asked,
before any lock and any transaction. What can change is read with the lock.

Each kind of data takes one statement per batch. The customers are locked first, sorted. Their history is counted in a
later statement than the lock: a count in the locking statement uses the snapshot from before the wait. That granted 32
messages of a cap of 3.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from json import JSONDecoder
from typing import Any
from uuid import UUID

from django.conf import settings

from scheduling import sql
from scheduling.configuration.snapshot import Snapshot, sort_texts
from scheduling.delivery import presence
from scheduling.delivery.outgoing import Delivery, ServerClock
from scheduling.delivery.presence import PresenceQuestion
from scheduling.delivery.routing import FoundRoute, Target, find_disabled_targets, load_community_targets
from scheduling.ledger import locks
from scheduling.ledger.touches import LockedTouch, touch_ledger
from scheduling.ledger.transitions import WakeUp
from scheduling.planning import earlier_events
from scheduling.policy.guards import AwaitedTouch, Candidate, CapSlot, GuardContext
from scheduling.policy.matrix import collect_facts
from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec, template_for

MOST_BYTES = 16 * 1024 * 1024  #: event data per batch

_parse = JSONDecoder().raw_decode  # psycopg's way through `json.loads` takes three times as long


@dataclass(eq=False, slots=True)
class AnnouncedTouch:
    """A touch of one message: what never changes about it, what was read with its lock, and what is decided."""

    task_id: UUID
    customer_id: int
    node_id: int
    root_id: UUID
    republished: bool
    planned_at: datetime  #: may change, but only Presence uses it
    readable: bool  #: False: its event data is too large for this batch and was left out
    event: EventSpec
    question: PresenceQuestion | None = None  #: to the presence providers
    presence_block: str = ""  #: why a provider blocks it
    locked: LockedTouch = field(init=False, repr=False)  #: only of those that are due
    delivery: Delivery | None = None  #: present if it is sent
    detail: str = ""  #: why no message could be prepared

    @property
    def is_retry(self) -> bool:
        """Return whether it is a later attempt, or a retry of another touch."""
        return self.republished or self.locked.attempt > 0

    @property
    def wakeup(self) -> WakeUp:
        return WakeUp(self.task_id, self.locked.due_at, self.locked.priority, self.node_id)


def read_announced(task_ids: Sequence[UUID], config: Snapshot) -> dict[UUID, AnnouncedTouch]:
    """Read the touches that have not ended with their events, and ask the presence providers about them.

    Asked are touches whose node respects conversations, and touches whose event belongs to a provider. The sender asks
    again right before it sends them.
    """
    touches = load_announced(task_ids, most_bytes=MOST_BYTES)
    if presence.presence_providers():
        asking, types = config.asking_presence, presence.provider_event_types()
        questions = {}
        for touch in touches.values():
            event = touch.event
            if touch.node_id in asking or event.type in types:
                questions[touch.task_id] = touch.question = PresenceQuestion(
                    event.user_id, event.chat_id, event.type, event.event_id, event.occurred_at, touch.planned_at
                )
        answers = presence.presence_blocks(list(questions.values()))
        for task_id, answer in zip(questions, answers, strict=True):
            touches[task_id].presence_block = answer
    return touches


def load_announced(task_ids: Sequence[UUID], *, most_bytes: int) -> dict[UUID, AnnouncedTouch]:
    """Return the touches among `task_ids` that have not ended, with their events.

    Once the event data reaches `most_bytes`, that of less important touches is left out. One touch is always readable.

    A touch that runs now is among them: it may be waiting again before the lock.
    """
    rows = sql.rows(ANNOUNCE_STATEMENT, {"ids": list(task_ids), "most_bytes": most_bytes})
    announced = {}
    for task_id, customer_id, node_id, root_id, republished, planned_at, readable, *values, data, trace_id in rows:
        event = EventSpec._make((*values, _parse(data)[0] if data else {}, trace_id))
        announced[task_id] = AnnouncedTouch(
            task_id, customer_id, node_id, root_id, republished, planned_at, readable, event
        )
    return announced


# The size of compressed data is estimated from the stored size, because reading it costs as much as returning it. Text
# of one repeated letter, the extreme, expands 85 times under pglz and 250 times under lz4; ordinary JSON 3 to 10 times.
ANNOUNCE_STATEMENT = """
WITH announced AS MATERIALIZED (
    SELECT task_id, customer_id, node_id, root_id, retry_of IS NOT NULL AS republished,
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


def load_edited_texts(root_ids: Sequence[UUID]) -> dict[UUID, TextSpec]:
    """Return what operators wrote in place of the rendered template, by delivery key, without locale.

    All retries under that key send the same text.
    """
    rows = sql.rows(_EDITED, {"roots": list(root_ids)})
    return {root_id: TextSpec("", subject or "", body) for root_id, subject, body in rows if body}


# An edited touch has a delivery key of its own: the id under which it was published again.
_EDITED = """
SELECT retried_as, difference -> 'after' ->> 'subject', difference -> 'after' ->> 'body'
FROM scheduling_failedtask
WHERE retried_as = ANY(%(roots)b) AND difference IS NOT NULL
"""


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

    `slots` and `community_slots` hold cap slots by customer and by community. `important` holds touches that soon fall
    due for a customer. `cancelled_by` holds the reason of an event that cancelled a touch while a worker held it.
    `with_unknown_outcome` holds the touches with an earlier attempt of unknown outcome, and `on_changed_channel` those
    of them whose channel cannot repeat it. `first_attempts` holds the content to repeat. `earlier` counts the events
    before an event.
    """

    slots: dict[int, list[CapSlot]] = field(default_factory=dict)
    community_slots: dict[str, list[CapSlot]] = field(default_factory=dict)
    important: dict[int, list[AwaitedTouch]] = field(default_factory=dict)
    cancelled_by: dict[UUID, str] = field(default_factory=dict)
    with_unknown_outcome: set[UUID] = field(default_factory=set)
    on_changed_channel: set[UUID] = field(default_factory=set)
    first_attempts: dict[UUID, FirstAttempt] = field(default_factory=dict)
    edited: Mapping[UUID, TextSpec] = field(default_factory=dict)  #: by delivery key
    earlier: Mapping[UUID, Mapping[str, int]] = field(default_factory=dict)

    def add_cap_slot(self, touch: AnnouncedTouch, slot: CapSlot) -> None:
        """Add a cap slot that the rest of the batch counts."""
        self.slots.setdefault(touch.customer_id, []).append(slot)
        if touch.event.chat_id:
            self.community_slots.setdefault(touch.event.chat_id, []).append(slot)


@dataclass(frozen=True, slots=True)
class DueBatch:
    """The locked touches of one message, with all that judging needs."""

    config: Snapshot
    due: list[AnnouncedTouch]
    rest: list[WakeUp]  #: left to the next batch, because their event data is too large for this one
    clock: ServerClock  #: at the lock
    customers: dict[int, CustomerSpec]
    history: CustomerHistory
    communities: Mapping[str, Mapping[str, Any]]
    disabled: set[Target]
    routes: Mapping[UUID, FoundRoute] = field(default_factory=dict)  #: of the touches that admission has routed

    @property
    def locked_at(self) -> datetime:
        return self.clock.at

    def candidate(self, touch: AnnouncedTouch) -> Candidate:
        event, locked = touch.event, touch.locked
        node, customer = self.config.nodes[touch.node_id], self.customers[touch.customer_id]
        facts = None
        if touch.node_id in self.config.judging_facts:
            facts = collect_facts(event, customer, self.history.earlier.get(event.id, {}))
        first = self.history.first_attempts.get(touch.task_id)
        template_id = first.template_id if first else locked.template_id
        kept = self.config.templates.get(template_id) if template_id else None
        if first and kept:
            kept = first.pin(kept)
        return Candidate(
            touch.task_id,
            node,
            customer,
            kept or template_for(node, event.chat_id, event.user_id, facts),
            event.chat_id,
            event.occurred_at,
            locked.expires_at,
            locked.reserved_at is not None,
            facts,
        )

    def build_context(self, touch: AnnouncedTouch) -> GuardContext:
        history, priority = self.history, touch.locked.priority
        important = history.important.get(touch.customer_id)
        return GuardContext(
            self.config.rules,
            self.config.paused,
            history.slots.get(touch.customer_id, ()),
            history.community_slots.get(touch.event.chat_id, ()),
            [each for each in important if each.priority < priority] if important else (),
            history.cancelled_by.get(touch.task_id, ""),
            touch.presence_block,
            self.config.checks[touch.node_id],
        )


def lock(announced: Mapping[UUID, AnnouncedTouch], config: Snapshot) -> DueBatch | None:
    """Lock customers, communities and due touches, then load their history. Return None if no touch is due.

    Call it in a transaction. It makes no external call.
    """
    if not announced:
        return None
    task_ids = list(announced)
    customers = locks.lock_customers_of_touches(task_ids)
    if config.counts_communities:
        locks.lock_communities(task_ids)
    monotonic = time.monotonic()
    locked, locked_at = touch_ledger.lock_due(task_ids)
    if locked_at is None:
        return None
    due: list[AnnouncedTouch] = []
    rest: list[WakeUp] = []
    for row in locked:
        touch = announced[row.task_id]
        touch.locked = row
        if touch.readable:
            due.append(touch)
        else:
            rest.append(touch.wakeup)
    communities = load_community_targets(touch.event.chat_id for touch in due)
    wanted = ((config.nodes[touch.node_id].channel, customers[touch.customer_id], touch.event.chat_id) for touch in due)
    disabled = find_disabled_targets(wanted, communities)
    history = load_history(due, config, locked_at)
    add_profiles(customers, due, history, config)
    clock = ServerClock(locked_at, monotonic)
    return DueBatch(config, due, rest, clock, customers, history, communities, disabled)


def add_profiles(
    customers: dict[int, CustomerSpec], due: Sequence[AnnouncedTouch], history: CustomerHistory, config: Snapshot
) -> None:
    """Add the profiles of those customers whose touches may need one. Most batches need none.

    A retry may repeat a text that the node no longer has.
    """
    reading = {
        touch.customer_id
        for touch in due
        if touch.node_id in config.profile_nodes
        or touch.locked.template_id in config.profile_templates
        or (history.first_attempts and touch.task_id in history.first_attempts)
    }
    if reading:
        for customer_id, profile in locks.load_profiles(reading).items():
            customers[customer_id] = customers[customer_id]._replace(profile=profile)


def load_history(due: Sequence[AnnouncedTouch], config: Snapshot, at: datetime) -> CustomerHistory:
    """Load the history of these customers and communities within the windows of the rules before `at`.

    Call it after the locks.
    """
    history = CustomerHistory()
    if not due:
        return history
    customers = sorted({touch.customer_id for touch in due})
    chats = sorted({touch.event.chat_id for touch in due if touch.event.chat_id})
    _load_slots(history, customers, chats if config.counts_communities else [], config, at)
    lowest = max(touch.locked.priority for touch in due)
    if lowest > 0 and settings.AFTERTOUCH_SLOT_HOLD and any(rule.kind == "cap" for rule in config.rules):
        _load_important(history, due, lowest, config)
    _load_cancellations(history, due, config)
    _load_retries(history, due, config)
    if config.counting_earlier:
        history.earlier = earlier_events.count_before(
            (touch.event.id, config.counting_earlier[touch.node_id])
            for touch in due
            if touch.node_id in config.counting_earlier
        )
    return history


def load_customer_history(customer_id: int, chat_id: str, config: Snapshot) -> CustomerHistory:
    """Load the cap slots of one customer and community without a touch."""
    history = CustomerHistory()
    _load_slots(history, [customer_id], [chat_id] if chat_id else [], config, sql.now())
    return history


def _load_slots(
    history: CustomerHistory, customers: list[int], chats: list[str], config: Snapshot, at: datetime
) -> None:
    since = at - config.window
    if config.window:
        for customer_id, *slot in sql.rows(_SLOTS, {"owners": customers, "since": since}, replan=True):
            history.slots.setdefault(customer_id, []).append(CapSlot(*slot))
    if chats:
        for chat_id, *slot in sql.rows(_COMMUNITY_SLOTS, {"owners": chats, "since": since}, replan=True):
            history.community_slots.setdefault(chat_id, []).append(CapSlot(*slot))


def _load_important(history: CustomerHistory, due: Sequence[AnnouncedTouch], lowest: int, config: Snapshot) -> None:
    """Load more important touches that soon fall due.

    Touches of this batch are left out: they are judged first and take their slots.
    """
    judged = {touch.task_id for touch in due}
    customers = sorted({touch.customer_id for touch in due})
    counting = [node.id for node in config.nodes.values() if node.enabled and node.guard_cap != "ignore"]
    waiting = sql.rows(
        _IMPORTANT,
        {"customers": customers, "lowest": lowest, "hold": settings.AFTERTOUCH_SLOT_HOLD, "nodes": counting},
    )
    for task_id, customer_id, *awaited in waiting:
        if task_id not in judged:
            history.important.setdefault(customer_id, []).append(AwaitedTouch(*awaited))


def _load_cancellations(history: CustomerHistory, due: Sequence[AnnouncedTouch], config: Snapshot) -> None:
    """Load cancellations that happened while a worker held the touch, or after the end of the one that it repeats.

    `cancel_on` and `on_repeat` cannot cancel a touch that a worker holds or that has ended. A touch that its worker
    released or that was published again is therefore checked here. Any other touch at its first claim needs no check:
    events could always cancel it.
    """
    again = [
        (touch.task_id, config.nodes[touch.node_id]) for touch in due if touch.locked.lease_no > 1 or touch.is_retry
    ]
    revoking = [(task_id, kind) for task_id, node in again for kind in sorted(node.cancel_on)]
    if revoking:
        parameters = {"ids": [task_id for task_id, _ in revoking], "types": [kind for _, kind in revoking]}
        history.cancelled_by.update(sql.rows(_CANCELLED, parameters))
    restarting = [task_id for task_id, node in again if node.on_repeat == "restart"]
    if restarting:
        history.cancelled_by.update(sql.rows(_RESTARTED, {"ids": restarting}, replan=True))


def _load_retries(history: CustomerHistory, due: Sequence[AnnouncedTouch], config: Snapshot) -> None:
    retries = [touch for touch in due if touch.is_retry]
    if retries:
        repeated = [touch.task_id for touch in retries]
        history.with_unknown_outcome = touch_ledger.with_unknown_outcome(repeated)
        if history.with_unknown_outcome:
            doubtful = [touch for touch in retries if touch.task_id in history.with_unknown_outcome]
            channels = [config.nodes[touch.node_id].channel for touch in doubtful]
            parameters = {
                "ids": [touch.task_id for touch in doubtful],
                "channels": [channel.id for channel in channels],
                "idempotent": [channel.idempotent for channel in channels],
            }
            history.on_changed_channel.update(
                task_id for (task_id,) in sql.rows(_ON_CHANGED_CHANNEL, parameters, replan=True)
            )
        history.edited = load_edited_texts([touch.root_id for touch in retries])
        for task_id, template_id, version, subject, body, *texts in sql.rows(
            _FIRST_ATTEMPTS, {"ids": repeated}, replan=True
        ):
            stored = sort_texts(TextSpec(*text) for text in zip(*(each or () for each in texts), strict=True))
            history.first_attempts[task_id] = FirstAttempt(template_id, version, subject, body, stored)


# A slot is reserved before its touch ends, so its partition is as old as the window at most. `OFFSET 0` keeps one probe
# per owner: while a young partition has no statistics, PostgreSQL would rather read all ends of the window. A pause has
# no known end, so its touches are asked about once a minute.
_SLOTS_OF = """
SELECT owner.id, slot.*
FROM unnest(%(owners)b::{type}[]) AS owner(id) CROSS JOIN LATERAL (
    SELECT task_id, reserved_at, content_type, counts_toward_cap, false,
           CASE WHEN paused_by = '' THEN COALESCE(lease_until, due_at)
                ELSE statement_timestamp() + interval '1 minute' END,
           node_id, COALESCE(template_id, 0)
    FROM scheduling_touch_live
    WHERE {column} = owner.id AND reserved_at IS NOT NULL AND reserved_at > %(since)s
    UNION ALL
    SELECT task_id, reserved_at, content_type, counts_toward_cap, true, due_at, node_id, COALESCE(template_id, 0)
    FROM scheduling_touch_ended
    WHERE {column} = owner.id AND reserved_at IS NOT NULL AND reserved_at > %(since)s AND settled_at > %(since)s
    OFFSET 0
) AS slot
"""
_SLOTS = _SLOTS_OF.format(column="customer_id", type="bigint")
_COMMUNITY_SLOTS = _SLOTS_OF.format(column="chat_id <> '' AND chat_id", type="text")

_CANCELLED = """
SELECT t.task_id, 'event:' || min(later.type)
FROM unnest(%(ids)b::uuid[], %(types)b::text[]) AS v(task_id, type)
JOIN scheduling_touch_live AS t USING (task_id)
JOIN scheduling_event AS e ON e.id = t.event_id
JOIN scheduling_event AS later ON later.customer_id = t.customer_id AND later.type = v.type
    AND later.occurred_at >= e.occurred_at AND later.received_at > e.received_at
WHERE later.id <> e.id
GROUP BY t.task_id
"""

# The touch that a newer event planned instead. A late event with an earlier time replaces nothing. Joined through
# events, because ended touches have no index by node. The time of receipt keeps the customer's older events from a
# probe of all partitions each.
_RESTARTED = """
SELECT t.task_id, 'restarted:' || min(later.type)
FROM scheduling_touch_live AS t
JOIN scheduling_event AS e ON e.id = t.event_id
JOIN scheduling_event AS later ON later.customer_id = t.customer_id AND later.type = e.type
    AND later.occurred_at >= e.occurred_at AND later.received_at > e.received_at AND later.id <> e.id
CROSS JOIN LATERAL (
    SELECT FROM scheduling_touch AS newer WHERE newer.event_id = later.id AND newer.node_id = t.node_id
        AND newer.retry_of IS NULL AND newer.created_at > e.received_at
    LIMIT 1
) AS newer
WHERE t.task_id = ANY(%(ids)b)
GROUP BY t.task_id
"""

_IMPORTANT = """
SELECT task_id, customer_id, due_at, node_id, priority FROM scheduling_touch_live
WHERE customer_id = ANY(%(customers)b) AND state IN ('scheduled', 'queued') AND paused_by = ''
  AND priority < %(lowest)s AND due_at <= statement_timestamp() + %(hold)s
  AND reserved_at IS NULL AND COALESCE(node_id, 0) = ANY(%(nodes)b)
"""

# An attempt of unknown outcome is repeated only by the channel that made it, and only while its receiver knows repeated
# keys. The history tells which channel the node had at the verdict, with which the message was made: an edit between
# verdict and call concerns later ones. An operator who published the touch again has decided already, so only the
# touch's own attempts count.
_ON_CHANGED_CHANNEL = """
SELECT DISTINCT t.task_id
FROM unnest(%(ids)b::uuid[], %(channels)b::bigint[], %(idempotent)b::bool[]) AS present(task_id, channel_id, idempotent)
JOIN scheduling_touch_live AS t ON t.task_id = present.task_id
CROSS JOIN LATERAL touch_attempts(t.attempts) AS a
CROSS JOIN LATERAL (
    SELECT COALESCE(max(v.at), a.started_at) AS at FROM touch_verdicts(t.verdicts) AS v
    WHERE v.decision = 'send' AND v.at <= a.started_at
) AS verdict
CROSS JOIN LATERAL (
    SELECT h.channel_id FROM scheduling_historicalnode AS h
    WHERE h.id = t.node_id AND h.history_date <= verdict.at
    ORDER BY h.history_date DESC, h.history_id DESC LIMIT 1
) AS node
CROSS JOIN LATERAL (
    SELECT h.idempotent FROM scheduling_historicalchannelconfig AS h
    WHERE h.id = node.channel_id AND h.history_date <= verdict.at
    ORDER BY h.history_date DESC, h.history_id DESC LIMIT 1
) AS channel
WHERE t.task_id = ANY(%(ids)b) AND a.outcome = 'unknown'
  AND (node.channel_id <> present.channel_id OR NOT present.idempotent OR NOT channel.idempotent)
"""

# `retry_of` links touches that share a delivery key. An attempt with a body precedes a lost one: after a lost first
# attempt, the second one sent the same content. For a lost attempt only the text valid at its verdict is known.
_FIRST_ATTEMPTS = """
WITH RECURSIVE chain AS (
    SELECT task_id, root_id, retry_of, template_id, template_version, attempts, verdicts
    FROM scheduling_touch_live WHERE task_id = ANY(%(ids)b)
    UNION ALL
    SELECT chain.task_id, t.root_id, t.retry_of, t.template_id, t.template_version, t.attempts, t.verdicts
    FROM chain CROSS JOIN LATERAL (
        SELECT * FROM scheduling_touch_ended AS t WHERE t.task_id = chain.retry_of AND t.root_id = chain.root_id LIMIT 1
    ) AS t
), first AS MATERIALIZED (
    SELECT DISTINCT ON (chain.task_id) chain.task_id, chain.verdicts, chain.template_id, chain.template_version,
           a.subject, a.body, a.started_at
    FROM chain CROSS JOIN LATERAL touch_attempts(chain.attempts) AS a
    WHERE chain.template_id IS NOT NULL AND chain.template_version IS NOT NULL
    ORDER BY chain.task_id, a.body = '', a.started_at
)
SELECT first.task_id, first.template_id, first.template_version, first.subject, first.body,
       texts.locales, texts.subjects, texts.bodies
FROM first LEFT JOIN LATERAL (
    SELECT array_agg(stood.locale) AS locales, array_agg(stood.subject) AS subjects, array_agg(stood.body) AS bodies
    FROM (
        SELECT DISTINCT ON (h.id) h.history_type, h.locale, h.subject, h.body
        FROM scheduling_historicaltemplatetext AS h
        WHERE h.template_id = first.template_id AND h.history_date <= (
            SELECT max(v.at) FROM touch_verdicts(first.verdicts) AS v
            WHERE v.decision = 'send' AND v.at <= first.started_at
        )
        ORDER BY h.id, h.history_date DESC, h.history_id DESC
    ) AS stood
    WHERE stood.history_type <> '-'
) AS texts ON first.body = ''
"""
