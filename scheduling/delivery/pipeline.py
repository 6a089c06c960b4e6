"""Deliver a batch of touches: ask presence, reserve slots → lock → admit → judge → settle → commit → send.

One transaction locks, judges and writes, each row once. It makes no external call. The sender settles the results of
its calls by `settling`. Judging decides about every admitted touch, and ends an expired one.
"""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache, partial
from uuid import UUID

import structlog
from django.db import transaction

from scheduling import batching, sql, tracing
from scheduling.channels.base import Message
from scheduling.configuration import snapshot
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery import due_batch, presence
from scheduling.delivery.admission import (
    QUOTA,
    LaneWaits,
    admit_batch,
    forget_quota_slots,
    report_deferrals,
    reserve_quota_slots,
)
from scheduling.delivery.due_batch import AnnouncedTouch, DueBatch, read_announced
from scheduling.delivery.links import tracks_links
from scheduling.delivery.outgoing import LEASE, Delivery
from scheduling.delivery.routing import NoTarget, Route
from scheduling.delivery.sender import sender
from scheduling.delivery.settling import (
    FAILED_ENDS,
    decision_for,
    keep_outcome_unknown,
    log_failed,
    measure_settlements,
)
from scheduling.dispatch import publish_touches
from scheduling.ledger.failures import record_failed_touches
from scheduling.ledger.touches import touch_ledger
from scheduling.ledger.transitions import Claim, Content, Settlement, WakeUp
from scheduling.models.encrypted import Unreadable
from scheduling.policy import guards
from scheduling.policy.guards import NODE_DISABLED, Candidate, CapSlot, GuardVerdict
from scheduling.strict_text import storable_text
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
        touch_ledger.write_decisions({end: [task_id]}, at=locked_at, lease=LEASE)
        if end.state in FAILED_ENDS:
            record_failed_touches([task_id], details={task_id: traceback.format_exc(limit=-5)})
    measure_settlements({end: 1})


def _deliver_batch(task_ids: Sequence[UUID], waits: LaneWaits) -> None:
    config = snapshot.current()
    announced = read_announced(task_ids, config)
    slots = reserve_quota_slots(task_ids, config)
    decisions: Decisions = {}
    deferred: dict[UUID, Settlement] = {}
    rest: list[WakeUp] = []
    with transaction.atomic():
        locked = due_batch.lock(announced, config)
        if locked:
            batch, deferred = admit_batch(locked, slots, waits)
            if deferred:
                touch_ledger.defer(deferred)
            decisions = _write_decisions(batch, judge_batch(batch))
            decided = {each.task_id for alike in decisions.values() for each in alike}
            rest = [*batch.rest, *(each.wakeup for each in batch.due if each.task_id not in decided)]
    judged = [each for alike in decisions.values() for each in alike]
    keep = {task_id for task_id, end in deferred.items() if end.reason != QUOTA}
    keep |= {each.task_id for each in rest}  # they are published at once and use the slots that they have
    forget_quota_slots(set(task_ids) - keep)
    # Before any statement that may fail: the touches are claimed.
    deliveries = [each.delivery for each in judged if each.delivery]
    if deliveries:
        sender().submit(deliveries)
    presence.note_sending(_list_stopped_notes(judged))
    _log_unsent(decisions, config)
    if locked and deferred:
        report_deferrals(locked, deferred)
    measure_settlements({end: len(alike) for end, alike in decisions.items()})  # after the commit
    publish_touches(rest, config.nodes)  # at once, without waiting for its lease; the lease covers a lost message
    if len(judged) + len(rest) + len(deferred) < len(task_ids):
        # Premature wake-ups, which a node with a fast clock caused.
        publish_touches(touch_ledger.premature_wakeups(task_ids), config.nodes)


def _write_decisions(batch: DueBatch, decisions: Decisions) -> Decisions:
    """Write claim and state of each touch, the verdicts, and the failed tasks. Return what was written.

    A touch whose node is off stays unchanged if the configuration has changed since: an undo of the switch would not
    see its late end.
    """
    if not decisions:
        return decisions
    written = touch_ledger.write_decisions(
        {end: [each.task_id for each in alike] for end, alike in decisions.items()},
        at=batch.locked_at,
        lease=LEASE,
        version=batch.config.version,
    )
    if written < sum(map(len, decisions.values())):
        decisions = {end: alike for end, alike in decisions.items() if end.reason != NODE_DISABLED}
    failed = [each for end, alike in decisions.items() if end.state in FAILED_ENDS for each in alike]
    details = {each.task_id: each.detail for each in failed}
    record_failed_touches(list(details), details=details)
    return decisions


def _list_stopped_notes(judged: Sequence[AnnouncedTouch]) -> list[presence.SendingNote]:
    """Return the questions about events of presence providers whose touches stop here, after an earlier claim.

    A worker that was killed before the mark, or had no connection, may have asked the last question. A touch that was
    tried before may have been sent, so it is left out.
    """
    types = presence.provider_event_types()
    return [
        (touch.question, False)
        for touch in judged
        if not touch.delivery and touch.locked.attempt == 0 and touch.locked.lease_no > 1
        if touch.question and touch.event.type in types
    ]


def _log_unsent(decisions: Decisions, config: Snapshot) -> None:
    """Log the touches that were not sent. The sender logs the others."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for end, touches in decisions.items():
        if end.state in FAILED_ENDS:
            for touch in touches:
                log_failed(touch.task_id, touch.event.trace, end, node=config.nodes[touch.node_id].key)
        elif end.state != "running":
            names[end.state, end.reason] += [tracing.trace_label(touch.event.trace, touch.task_id) for touch in touches]
    for (state, reason), labels in names.items():
        tracing.log_touches("touches_settled", labels, state=state, reason=reason)


# --- judging ----------------------------------------------------------------------------------------------------------


LONGEST_JUDGING = 3.0  #: seconds per batch, during which its customers are locked


Decisions = dict[Settlement, list[AnnouncedTouch]]  #: the judged touches of a batch by what is decided about them


def judge_batch(batch: DueBatch) -> Decisions:
    """Judge the touches in the order of admission, the most important first: the first one gets a free cap slot.

    Customers and touches are locked for at most `LONGEST_JUDGING` seconds. Touches not judged by then are left to the
    next batch.
    """
    ends_at = time.monotonic() + LONGEST_JUDGING
    decisions: Decisions = {}
    for touch in batch.due:
        if decisions and time.monotonic() > ends_at:
            break
        candidate = batch.candidate(touch)
        verdict = guards.judge_touch(candidate, batch.build_context(touch), batch.locked_at)
        if verdict.decision == guards.SEND:
            settlement = _prepare_send(batch, touch, candidate, verdict)
        else:
            settlement = _without_attempt(batch, touch, decision_for(verdict))
        decisions.setdefault(settlement, []).append(touch)
    return decisions


def _prepare_send(batch: DueBatch, touch: AnnouncedTouch, candidate: Candidate, verdict: GuardVerdict) -> Settlement:
    """Render the message and find its target before the touch takes a cap slot. Set its delivery.

    A failure after that would use a slot that other touches need.
    """
    template, counts = candidate.template, candidate.node.guard_cap != "ignore"
    content = Content(template.content_type, template.id, template.version, counts)
    try:
        if touch.task_id in batch.history.on_changed_channel:
            raise NoTarget("channel_changed", "the channel that may have sent it is another one, or not idempotent")
        route = batch.routes[touch.task_id]
        if isinstance(route, NoTarget):
            raise NoTarget(route.reason, str(route))
        if isinstance(route, Unreadable):
            raise Unreadable(str(route))
        message = _build_message(batch, touch, candidate, route)
    except (CannotRender, NoTarget) as error:
        reason = "template_data_missing" if isinstance(error, CannotRender) else error.reason
        touch.detail = storable_text(str(error))
        failed = Settlement("failed", reason, releases_cap_slot=True, content=content, verdict=verdict)
        return _without_attempt(batch, touch, failed)
    if not candidate.has_cap_slot:
        until = batch.locked_at + LEASE
        slot = CapSlot(
            touch.task_id, batch.locked_at, template.content_type, counts, False, until, touch.node_id, template.id
        )
        batch.history.add_cap_slot(touch, slot)
    touch.delivery = _build_delivery(batch, touch, message, route, candidate)
    return _build_send_settlement(content, verdict)


@lru_cache(maxsize=1024)
def _build_send_settlement(content: Content, verdict: GuardVerdict) -> Settlement:
    """Return one object for all touches with the same content: they are compared when they are stored together."""
    return Settlement("running", content=content, verdict=verdict)


def _without_attempt(batch: DueBatch, touch: AnnouncedTouch, ended: Settlement) -> Settlement:
    return keep_outcome_unknown(ended) if touch.task_id in batch.history.with_unknown_outcome else ended


def _build_message(batch: DueBatch, touch: AnnouncedTouch, candidate: Candidate, route: Route) -> Message:
    node, template, event = candidate.node, candidate.template, touch.event
    subject, body, locale = _render(batch, touch, candidate, route)
    return Message(
        task_id=touch.task_id,
        delivery_key=touch.root_id,
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


def _build_delivery(
    batch: DueBatch, touch: AnnouncedTouch, message: Message, route: Route, candidate: Candidate
) -> Delivery:
    spec, locked = candidate.node.channel, touch.locked
    return Delivery(
        Claim(touch.task_id, locked.lease_no), message, route.channel, spec, locked.attempt + 1, locked.due_at,
        locked.expires_at, batch.clock,
        node_id=touch.node_id,
        priority=locked.priority,
        receiver=route.receiver,
        vendor_key=route.vendor_key,
        tracks_links=tracks_links(candidate.template, route.channel),
        event_at=touch.event.occurred_at if touch.node_id in batch.config.asking_presence else None,
        question=touch.question,
        with_unknown_outcome=touch.task_id in batch.history.with_unknown_outcome,
    )  # fmt: skip


def _render(batch: DueBatch, touch: AnnouncedTouch, candidate: Candidate, route: Route) -> tuple[str, str, str]:
    """Return subject, body and locale.

    A retry under the same delivery key repeats the content of the first attempt. A receiver that honours the key may
    keep either message. A text that an operator edited replaces the template's.
    """
    first = batch.history.first_attempts.get(touch.task_id)
    known = first if first and first.body else batch.history.edited.get(touch.root_id)
    if known:
        return known.subject, known.body, choose_text(candidate.template, candidate.customer.locale).locale
    return render_message(candidate.template, candidate.customer, touch.event, route.channel.escape)
