"""Deliver a batch of touches: ask presence, reserve slots → lock → admit → judge → settle → commit → send.

One transaction locks, judges and writes, each row once. It makes no external call. The sender settles the results of
its calls by `settle_results`.

Admission lets the due touches pass that their receivers take now. Each of the others gets an instant of its own. A
deferral is one write of the row: no claim, no verdict, no message. Judging decides about everything else when a touch
is admitted. It ends an expired touch too. A wrong estimate costs another deferral.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

import structlog
from django.db import transaction

from scheduling import batching, metrics, sql, tracing
from scheduling.batching import BackgroundBatcher
from scheduling.channels.base import Message, Quotas
from scheduling.channels.quota import SlotRequest
from scheduling.configuration import snapshot
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery import due_batch, presence
from scheduling.delivery.due_batch import Announcement, Due, DueBatch, read_announced
from scheduling.delivery.links import rewrite_links, tracks_links
from scheduling.delivery.outgoing import LEASE, Delivery
from scheduling.delivery.routing import (
    NoTarget,
    Route,
    channel_of,
    find_disabled_targets,
    find_route,
    load_community_targets,
    target_for,
)
from scheduling.delivery.sender import (
    FAILED_ENDS,
    decision_for,
    keep_outcome_unknown,
    log_failed,
    measure_deferrals,
    measure_ends,
    measure_verdicts,
    sender,
)
from scheduling.dispatch import publish_touches
from scheduling.ledger.failures import record_failed_touches
from scheduling.ledger.touches import FreedSlot, TouchDecision, touch_ledger
from scheduling.ledger.transitions import Content, Settlement
from scheduling.models.encrypted import Unreadable
from scheduling.policy import guards
from scheduling.policy.guards import NODE_DISABLED, Candidate, CapSlot, GuardVerdict
from scheduling.policy.specs import CustomerSpec
from scheduling.templating import CannotRender, choose_text, render_message

log = structlog.get_logger(__name__)


# --- a batch ----------------------------------------------------------------------------------------------------------


#: Deferral while an operator changes keys node by node. Another node may have the key and deliver the touch.
UNREADABLE_DELAY = timedelta(minutes=1)


def deliver_touches(task_ids: Sequence[UUID]) -> None:
    """Deliver the touches that are due and that no other worker has locked.

    An unexpected error must not affect other touches: the batch is halved until the faulty touch fails alone. A batch
    that exceeds a time limit of PostgreSQL is halved as well. A touch whose secrets this node cannot decrypt is
    deferred.

    Raises:
        django.db.Error: PostgreSQL is unavailable, or it exceeded its time limit for a single touch.
            The latter may mean that the machine was suspended.
    """
    batching.bisect(task_ids, partial(_deliver_batch, waits={}), _give_up, concerns_all=_concerns_all)


def _concerns_all(error: Exception, count: int) -> bool:
    return isinstance(error, sql.UNAVAILABLE_ERRORS) and (count == 1 or not sql.is_idle_timeout(error))


def _give_up(task_id: UUID, error: Exception) -> None:
    """Settle a touch that cannot be judged, without an attempt."""
    if isinstance(error, Unreadable):
        log.error("secrets_unreadable", task_id=str(task_id), error=str(error))
        end = Settlement("scheduled", "secrets_unreadable", sql.now() + UNREADABLE_DELAY)
    else:
        log.exception("touch_judgement_failed", task_id=str(task_id))
        end = Settlement("failed", "internal_error")
    with transaction.atomic():
        _locked, locked_at = touch_ledger.lock_due([task_id])
        if locked_at is None:  # it has ended, waits for its time, or another worker has it
            return
        if touch_ledger.with_unknown_outcome([task_id]):
            end = keep_outcome_unknown(end)
        else:
            end = end._replace(releases_cap_slot=True)
        touch_ledger.write_decisions({TouchDecision(end, None): [task_id]}, at=locked_at, lease=LEASE)
        if end.state in FAILED_ENDS:
            record_failed_touches([task_id], details={task_id: traceback.format_exc(limit=-5)})


def _deliver_batch(task_ids: Sequence[UUID], waits: LaneWaits) -> None:
    config = snapshot.current()
    announced = read_announced(task_ids, config)
    slots = reserve_quota_slots(task_ids, config)
    with transaction.atomic():
        locked = due_batch.lock(announced, config)
        batch, deferred = admit_batch(locked, slots, waits) if locked else (None, {})
        if deferred:
            touch_ledger.defer(deferred)
        judged = judge_batch(batch) if batch else []
        decisions = _write_decisions(batch, judged) if batch and judged else {}
    judged = [each for alike in decisions.values() for each in alike]
    settled = {each.row.task_id for each in judged}
    rest = [*batch.rest, *(each.wakeup for each in batch.due if each.task_id not in settled)] if batch else []
    keep = {task_id for task_id, (reason, _) in deferred.items() if reason != QUOTA}
    keep |= {each.task_id for each in rest}  # they are published at once and use the slots that they have
    forget_quota_slots(set(task_ids) - keep)
    # Before any statement that may fail: the touches are claimed.
    deliveries = [each.delivery for each in judged if each.delivery]
    if deliveries:
        sender().submit(deliveries)
    presence.note_sending(_list_stopped_notes(judged, announced))
    _log_unsent(decisions, config)
    if locked and deferred:
        report_deferrals(locked, deferred)
    if batch:
        _measure(decisions)
    publish_touches(rest, config.nodes)  # at once, without waiting for its lease; the lease covers a lost message
    if len(judged) + len(rest) + len(deferred) < len(task_ids):
        # Premature wake-ups, which a node with a fast clock caused.
        publish_touches(touch_ledger.premature_wakeups(task_ids), config.nodes)


def _write_decisions(batch: DueBatch, judged: Sequence[Judged]) -> Decided:
    """Write claim and state of each touch, the verdicts, and the failed tasks. Return what was written.

    A touch whose node is off stays unchanged if the configuration has changed since: an undo of the switch would not
    see its late end.
    """
    decisions: Decided = {}
    for each in judged:
        decisions.setdefault(TouchDecision(each.settlement, each.verdict), []).append(each)
    written = touch_ledger.write_decisions(
        {decision: [each.row.task_id for each in alike] for decision, alike in decisions.items()},
        at=batch.locked_at,
        lease=LEASE,
        version=batch.config.version,
    )
    if written < len(judged):
        decisions = {each: alike for each, alike in decisions.items() if each.settlement.reason != NODE_DISABLED}
    failed = [each for alike in decisions.values() for each in alike if each.settlement.state in FAILED_ENDS]
    details = {each.row.task_id: each.detail for each in failed}
    record_failed_touches(list(details), details=details)
    return decisions


def _list_stopped_notes(judged: Sequence[Judged], announced: Announcement) -> list[presence.SendingNote]:
    """Return the questions about events of presence providers whose touches stop here, after an earlier claim.

    A worker that was killed before the mark may have asked the last question. A touch that was marked before may have
    been sent, so it is left out.
    """
    types = presence.provider_event_types()
    stopped = [each.row for each in judged if not each.delivery and each.row.attempt == 0 and each.row.lease_no > 1]
    questions = [announced.questions.get(row.task_id) for row in stopped]
    return [(question, False) for question in questions if question and question.event_type in types]


def _log_unsent(decisions: Decided, config: Snapshot) -> None:
    """Log the touches that were not sent. The sender logs the others."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (end, _), alike in decisions.items():
        if end.state in FAILED_ENDS:
            for row in (each.row for each in alike):
                log_failed(row.task_id, row.event.trace, end, node=config.nodes[row.node_id].key)
        elif not alike[0].delivery:
            names[end.state, end.reason] += [
                tracing.trace_label(each.row.event.trace, each.row.task_id) for each in alike
            ]
    for (state, reason), labels in names.items():
        tracing.log_touches("touches_settled", labels, state=state, reason=reason)


@metrics.never_raises
def _measure(decisions: Decided) -> None:
    """Update the metrics, once per batch and after the commit."""
    ends: Counter[tuple[str, str]] = Counter()
    for (end, _), alike in decisions.items():
        ends[end.state, end.reason] += len(alike)
    measure_ends(ends)
    measure_verdicts((verdict, len(alike)) for (_, verdict), alike in decisions.items() if verdict)


# --- admission --------------------------------------------------------------------------------------------------------


QUOTA = "quota"
LANE_STEP = 0.5  #: seconds; the touches of a lane return in groups, because each message to a worker has a price
MOST_REMEMBERED = 20_000  #: slots
SLOT_MEMORY = 10.0  #: seconds; a slot that no commit used in this time may have passed
NEARLY_DUE = timedelta(milliseconds=50)  #: longer than from the question about slots to the lock


QuotaSlots = Mapping[UUID, datetime]  #: reserved slots ahead, by PostgreSQL's clock
Postponed = dict[UUID, tuple[str, datetime]]  #: reason and new due time
LaneWaits = dict[UUID, tuple[str, float]]  #: reason and instant in monotonic time
#: In the order of reservation: the slot, and when it was reserved in monotonic seconds.
recent_quota_slots: dict[UUID, tuple[datetime, float]] = {}
_Wanted = dict[tuple[str, int], list[tuple[UUID, SlotRequest]]]  #: by receiver and priority


def reserve_quota_slots(task_ids: Sequence[UUID], config: Snapshot) -> QuotaSlots:
    """Reserve a quota slot for each touch that needs one, in Redis. Call it before the transaction.

    Return the slots that lie ahead, by PostgreSQL's clock. A touch whose slot would lie after its expiry takes none. It
    waits until it expires, and judging ends it. A touch that is cancelled gives its slot back.
    """
    if not config.counting_quotas:
        return {}
    clock = time.monotonic()
    found = sql.rows(_WANTING, {"ids": list(task_ids), "nodes": list(config.counting_quotas), "nearly": NEARLY_DUE})
    known = {row[0]: slot for row in found if row[7] != QUOTA and (slot := _recall_quota_slot(row[0], clock))}
    found = [row for row in found if row[0] not in known]
    groups, lanes = _group_by_receiver(found, config)
    sending = sender()
    in_transit = {key: sum(map(sending.lanes.count_ungranted, receivers)) for key, receivers in lanes.items()}
    waits: dict[UUID, timedelta] = {}
    for quotas, wanted in groups.items():
        requests = {key: [request for _, request in group] for key, group in wanted.items()}
        for key, slots in sending.quotas.reserve(quotas, requests, in_transit).items():
            for (task_id, request), wait in zip(wanted[key], slots, strict=True):
                waits[task_id] = request.longest if wait is None else wait
    passed = timedelta(seconds=time.monotonic() - clock)
    fresh = {row[0]: row[6] + passed + waits[row[0]] if waits[row[0]] else row[6] for row in found if row[0] in waits}
    # Keep the latest slots. A batch that is halved, repeated or left for later must not reserve its slots again.
    recent_quota_slots.update({task_id: (slot, clock) for task_id, slot in fresh.items()})
    forget_quota_slots(list(islice(recent_quota_slots, max(len(recent_quota_slots) - MOST_REMEMBERED, 0))))
    return known | fresh


def _recall_quota_slot(task_id: UUID, clock: float) -> datetime | None:
    """Return the slot that a lost batch reserved moments ago."""
    slot, reserved_at = recent_quota_slots.get(task_id, (None, 0.0))
    return slot if clock - reserved_at <= SLOT_MEMORY else None


def forget_quota_slots(task_ids: Iterable[UUID]) -> None:
    """Forget the slots of touches that are claimed or wait for their slot. Their next wake-up reserves again.

    Call it after the commit. A touch that waits half a second for its lane keeps its slot, for `SLOT_MEMORY`.
    """
    for task_id in task_ids:
        recent_quota_slots.pop(task_id, None)


def _group_by_receiver(
    found: Sequence[tuple[Any, ...]], config: Snapshot
) -> tuple[dict[Quotas, _Wanted], dict[str, set[str]]]:
    """Return the touches by quotas, and the lanes of each receiver. Leave out touches with an unknown receiver."""
    communities = load_community_targets(row[2] for row in found)
    asked = [
        (config.nodes[row[1]].channel, CustomerSpec(0, "", addresses=row[3], conversation_at=row[8]), row[2])
        for row in found
    ]
    disabled = find_disabled_targets(asked, communities)
    groups: dict[Quotas, _Wanted] = {}
    lanes: dict[str, set[str]] = {}
    for (task_id, _, _, _, priority, expires_at, at, reason, _), touch in zip(found, asked, strict=True):
        route = find_route(*touch, communities, disabled)
        if route and route.channel.quotas:
            wanted = groups.setdefault(route.channel.quotas, {}).setdefault((route.vendor_key, priority), [])
            wanted.append((task_id, SlotRequest(expires_at - at, slot_came=reason == QUOTA)))
            if not route.channel.counts_addresses:  # else the lane's deliveries have other keys
                lanes.setdefault(route.vendor_key, set()).add(route.receiver)
    return groups, lanes


def return_quota_slots(slots: list[FreedSlot], **_: object) -> None:
    """Give the slots of cancelled touches back, so that later touches need not wait behind them.

    A thread of its own does it: the commit of intake waits for neither PostgreSQL nor Redis. A return that is lost
    leaves its slot unused. None is repeated.
    """
    freed_slots.submit(slots)


def _give_back(slots: Sequence[FreedSlot]) -> None:
    config = snapshot.current()
    wanted = {"nodes": list(config.counting_quotas)}
    wanted |= {f"each_{name}": [getattr(each, name) for each in slots] for name in FreedSlot._fields}
    groups, _lanes = _group_by_receiver(sql.rows(_FREED, wanted), config)
    for found in groups.values():
        sender().quotas.give_back({key: [(each, slot.longest) for each, slot in group] for key, group in found.items()})


freed_slots = BackgroundBatcher(_give_back, name="freed_slots")


def admit_batch(batch: DueBatch, slots: QuotaSlots, waits: LaneWaits) -> tuple[DueBatch, Postponed]:
    """Admit the touches that their receivers have room for, the most important first. Change no row.

    `waits` keeps the instants of lanes for the tries and halves of one batch: a second question takes a second instant.

    Return the batch without the postponed touches, and these.
    Touches with an unknown receiver are admitted: judging reports the error. So are touches of idle nodes, which
    judging defers or ends.
    """
    idle = batch.config.idle_nodes
    admitted: list[Due] = []
    routes: dict[UUID, Route] = {}
    postponed: Postponed = {}
    taken: Counter[str] = Counter()
    for row in sorted(batch.due, key=lambda row: (row.priority, row.due_at)):
        task_id = row.task_id
        if row.node_id not in idle and row.expires_at > batch.locked_at:
            if (slot := slots.get(task_id, batch.locked_at)) > batch.locked_at:
                postponed[task_id] = (QUOTA, slot)
                continue
            spec, customer = batch.config.nodes[row.node_id].channel, batch.customers[row.customer_id]
            route = find_route(spec, customer, row.event.chat_id, batch.communities, batch.disabled)
            wait = waits.get(task_id) or (
                route
                and sender().lanes.find_wait(
                    route.receiver, route.channel, row.priority, own=taken[route.receiver], total=len(routes)
                )
            )
            if wait:
                waits[task_id] = wait
                steps = math.ceil(batch.instant(wait[1]).timestamp() / LANE_STEP)
                postponed[task_id] = (wait[0], min(datetime.fromtimestamp(steps * LANE_STEP, UTC), row.expires_at))
                continue
            if route:
                taken[route.receiver] += 1
                routes[task_id] = route
        admitted.append(row)
    return replace(batch, due=admitted, routes=routes), postponed


def report_deferrals(batch: DueBatch, postponed: Postponed) -> None:
    """Log and measure the postponed touches of a batch. Call it after the commit."""
    found = Counter(
        (batch.config.nodes[row.node_id].channel.kind, postponed[row.task_id][0])
        for row in batch.due
        if row.task_id in postponed
    )
    for (kind, reason), count in found.items():
        log.info("touches_deferred", kind=kind, reason=reason, count=count)
    measure_deferrals(found)


# The columns of `_WANTING`. Each touch ends its wait when its slot comes.
_FREED = """
SELECT v.task_id, v.node_id, v.chat_id, c.addresses, v.priority, v.due_at, statement_timestamp(), '', c.conversation_at
FROM unnest(%(each_task_id)b::uuid[], %(each_node_id)b::bigint[], %(each_customer_id)b::bigint[],
            %(each_chat_id)b::text[], %(each_priority)b::int[], %(each_due_at)b::timestamptz[])
    AS v(task_id, node_id, customer_id, chat_id, priority, due_at)
JOIN scheduling_customer AS c ON c.id = v.customer_id
WHERE v.node_id = ANY(%(nodes)b::bigint[]) AND v.due_at > statement_timestamp()
"""

_WANTING = """
SELECT t.task_id, t.node_id, t.chat_id, c.addresses, t.priority, t.expires_at, statement_timestamp(), t.reason,
    c.conversation_at
FROM scheduling_touch_live AS t JOIN scheduling_customer AS c ON c.id = t.customer_id
WHERE t.task_id = ANY(%(ids)b) AND t.node_id = ANY(%(nodes)b::bigint[])
  AND COALESCE(t.state, '') IN ('scheduled', 'queued') AND COALESCE(t.paused_by, '') = ''
  AND t.due_at <= statement_timestamp() + %(nearly)s AND t.expires_at > statement_timestamp()
ORDER BY t.priority, t.due_at
"""


# --- judging ----------------------------------------------------------------------------------------------------------


LONGEST_JUDGING = 3.0  #: seconds per batch, during which its customers are locked


class Judged(NamedTuple):
    """A touch with its verdict and its next state."""

    row: Due
    verdict: GuardVerdict
    settlement: Settlement
    delivery: Delivery | None = None  #: present if the touch is sent
    detail: str = ""  #: why no message could be prepared


Decided = dict[TouchDecision, list[Judged]]  #: the touches of a batch by what is decided about them


def judge_batch(batch: DueBatch) -> list[Judged]:
    """Judge the most important touches first: the first one gets a free cap slot.

    Customers and touches are locked for at most `LONGEST_JUDGING` seconds. Touches not judged by then are left to the
    next batch.
    """
    ends_at = time.monotonic() + LONGEST_JUDGING
    judged: list[Judged] = []
    for row in sorted(batch.due, key=lambda row: (row.priority, row.due_at)):
        if judged and time.monotonic() > ends_at:
            break
        judged.append(_judge(batch, row))
    return judged


def _judge(batch: DueBatch, row: Due) -> Judged:
    candidate = batch.candidate(row)
    verdict = guards.judge_touch(candidate, batch.build_context(row), batch.locked_at)
    if verdict.decision == guards.SEND:
        return _prepare_send(batch, row, candidate, verdict)
    return Judged(row, verdict, _without_attempt(batch, row, decision_for(verdict)))


def _prepare_send(batch: DueBatch, row: Due, candidate: Candidate, verdict: GuardVerdict) -> Judged:
    """Render the message and find its target before it takes a cap slot.

    A failure after that would use a slot that other touches need.
    """
    template, counts = candidate.template, candidate.node.guard_cap != "ignore"
    content = (template.content_type, template.id, template.version, counts)
    try:
        if row.task_id in batch.history.on_changed_channel:
            raise NoTarget("channel_changed", "the channel that may have sent it is another one, or not idempotent")
        route = _route_of(batch, row, candidate)
        message = _build_message(batch, row, candidate, route)
    except (CannotRender, NoTarget) as error:
        reason = "template_data_missing" if isinstance(error, CannotRender) else error.reason
        failed = Settlement("failed", reason, releases_cap_slot=True, content=Content(*content))
        return Judged(row, verdict, _without_attempt(batch, row, failed), detail=str(error))
    if not candidate.has_cap_slot:
        until = batch.locked_at + LEASE
        slot = CapSlot(
            row.task_id, batch.locked_at, template.content_type, counts, False, until, row.node_id, template.id
        )
        batch.history.add_cap_slot(row, slot)
    return Judged(
        row, verdict, _build_send_settlement(*content), _build_delivery(batch, row, message, route, candidate)
    )


@lru_cache(maxsize=1024)
def _build_send_settlement(content_type: str, template_id: int, version: int, counts: bool) -> Settlement:
    """Return one object for all touches with the same content: they are compared when they are stored together."""
    return Settlement("running", content=Content(content_type, template_id, version, counts))


def _without_attempt(batch: DueBatch, row: Due, ended: Settlement) -> Settlement:
    return keep_outcome_unknown(ended) if row.task_id in batch.history.with_unknown_outcome else ended


def _route_of(batch: DueBatch, row: Due, candidate: Candidate) -> Route:
    """Return the route that admission found.

    Raises:
        NoTarget: admission found none.
    """
    if route := batch.routes and batch.routes.get(row.task_id):
        return route
    spec, chat_id = candidate.node.channel, row.event.chat_id
    channel = channel_of(spec)
    return Route(channel, target_for(spec, channel, candidate.customer, chat_id, batch.communities, batch.disabled))


def _build_message(batch: DueBatch, row: Due, candidate: Candidate, route: Route) -> Message:
    node, template, event = candidate.node, candidate.template, row.event
    subject, body, locale = _render(batch, row, candidate, route)
    return Message(
        task_id=row.task_id,
        delivery_key=row.root_id,
        user_id=event.user_id,
        chat_id=event.chat_id,
        node=node.key,
        content_type=template.content_type,
        category=template.category,
        subject=subject,
        body=body,
        locale=locale,
        event={"source": event.source, "id": event.event_id, "type": event.type, "time": event.occurred_at},
        repeatable=node.channel.idempotent,
        target=route.target,
        trace_id=event.trace,
        spoke_at=candidate.customer.conversation_at,
    )


def _build_delivery(batch: DueBatch, row: Due, message: Message, route: Route, candidate: Candidate) -> Delivery:
    spec = candidate.node.channel
    outgoing = rewrite_links(message) if tracks_links(candidate.template, route.channel) else message
    return Delivery(
        row.claim, message, outgoing, route.channel, spec, row.attempt + 1, batch.locked_at, row.expires_at,
        clock=batch.clock,
        node_id=row.node_id,
        priority=row.priority,
        receiver=route.receiver,
        event_at=row.event.occurred_at if row.node_id in batch.config.asking_presence else None,
        question=batch.announced.questions.get(row.task_id),
        with_unknown_outcome=row.task_id in batch.history.with_unknown_outcome,
        late=(batch.locked_at - row.due_at).total_seconds(),
    )  # fmt: skip


def _render(batch: DueBatch, row: Due, candidate: Candidate, route: Route) -> tuple[str, str, str]:
    """Return subject, body and locale.

    A retry under the same delivery key repeats the content of the first attempt. A receiver that honours the key may
    keep either message. A text that an operator edited replaces the template's.
    """
    first = batch.history.first_attempt(row)
    known = first if first and first.body else batch.history.edited.get(row.root_id)
    if known:
        return known.subject, known.body, choose_text(candidate.template, candidate.customer.locale).locale
    return render_message(candidate.template, candidate.customer, row.event, route.channel.escape)
