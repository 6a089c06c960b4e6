"""Deliver a batch of touches: ask presence, reserve slots → lock → admit → judge → settle → commit → send.

One transaction locks, judges and writes, each row once. It makes no external call. The sender settles the results of
its calls by `settlement.settle_results`.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import structlog
from django.db import transaction

from scheduling import batching, metrics, sql, tracing
from scheduling.channels.base import Channel, Delivered, Message
from scheduling.configuration import snapshot
from scheduling.configuration.snapshot import Snapshot
from scheduling.delivery import admission, due_batch, presence, settlement
from scheduling.delivery.due_batch import DueBatch, PresenceAnswers
from scheduling.delivery.judging import Judged, judge_batch
from scheduling.delivery.outgoing import LEASE, DeliveryResult
from scheduling.delivery.sender import sender
from scheduling.delivery.settlement import FAILED_ENDS
from scheduling.dispatch.publisher import publish_touches
from scheduling.ledger import dead_letters
from scheduling.ledger.touches import Reconfigured, touches
from scheduling.ledger.transitions import Settlement, WakeUp
from scheduling.models.encrypted import Unreadable

log = structlog.get_logger(__name__)

#: Deferral while an operator changes keys node by node. Another node may have the key and deliver the touch.
UNREADABLE_DELAY = timedelta(minutes=1)
MAX_JUDGEMENTS = 5  #: tries for a batch whose configuration changes while it is judged


def deliver_touches(task_ids: Sequence[UUID]) -> None:
    """Deliver the touches that are due and that no other worker has locked.

    An unexpected error must not affect other touches: the batch is halved until the faulty touch fails alone. A batch
    that exceeds a time limit of PostgreSQL is halved as well. A touch whose secrets this node cannot decrypt is
    deferred.

    Raises:
        django.db.Error: PostgreSQL is unavailable, or it exceeded its time limit for a single touch.
            The latter may mean that the machine was suspended.
        Reconfigured: the configuration changed during each of `MAX_JUDGEMENTS` tries.
    """
    batching.bisect(task_ids, _deliver_batch, _give_up, concerns_all=_concerns_all)


def _concerns_all(error: Exception, count: int) -> bool:
    if isinstance(error, sql.UNAVAILABLE_ERRORS):
        return count == 1 or not sql.is_idle_timeout(error)
    return isinstance(error, Reconfigured)


def _give_up(task_id: UUID, error: Exception) -> None:
    """Settle a touch that cannot be judged without an attempt."""
    if isinstance(error, Unreadable):
        log.error("secrets_unreadable", task_id=str(task_id), error=str(error))
        with transaction.atomic():
            _settle_without_attempt(
                task_id, Settlement("scheduled", "secrets_unreadable", sql.now() + UNREADABLE_DELAY)
            )
        return
    log.exception("touch_judgement_failed", task_id=str(task_id))
    with transaction.atomic():
        claimed = _settle_without_attempt(task_id, Settlement("failed", "internal_error"))
        dead_letters.record_failed_touches(claimed, details={task_id: traceback.format_exc(limit=-5)})


def _settle_without_attempt(task_id: UUID, end: Settlement) -> list[UUID]:
    """Claim and settle a touch. An earlier attempt may still have an unknown outcome.

    Return the claimed id, or nothing if the claim failed.
    """
    claims = touches.claim([task_id], lease=LEASE)
    end = (
        settlement.keep_outcome_unknown(end)
        if touches.with_unknown_outcome([task_id])
        else replace(end, releases_cap_slot=True)
    )
    touches.settle(dict.fromkeys(claims, end))
    return [claim.task_id for claim in claims]


def _deliver_batch(task_ids: Sequence[UUID]) -> None:
    slots = None
    for tries_left in reversed(range(MAX_JUDGEMENTS)):
        config = snapshot.current()
        answers = due_batch.ask_presence(task_ids, config)
        slots = admission.reserve_slots(task_ids, config) if slots is None else slots
        try:
            with transaction.atomic():
                batch = due_batch.lock(task_ids, config, answers)
                batch, deferred = admission.admit_batch(batch, slots) if batch else (None, {})
                if deferred:
                    touches.defer(deferred)
                judged, unjudged = judge_batch(batch) if batch else ([], [])
                if batch and judged:
                    _settle(batch, judged)
            break
        except Reconfigured:
            if not tries_left:
                raise
    rest = [*(batch.rest if batch else ()), *unjudged]
    if len(judged) + len(rest) + len(deferred) < len(task_ids):
        # Premature wake-ups, which a node with a fast clock caused.
        _publish(touches.premature_wakeups(task_ids), config)
    _publish(rest, config)  # at once, without waiting for its lease; the lease covers a lost message
    _submit(judged)
    presence.note_sending(_list_local_notes(judged, answers))
    _send_now(judged)
    _log_unsent(judged, config)
    for reason, count in Counter(reason for reason, _ in deferred.values()).items():
        log.info("touches_deferred", reason=reason, count=count)
    _measure(judged)


def _settle(batch: DueBatch, judged: Sequence[Judged]) -> None:
    """Write claim and state of each touch, the verdicts, the attempts of local channels, and the failed tasks."""
    settlements: dict[Settlement, list[UUID]] = {}
    for each in judged:
        settlements.setdefault(each.settlement, []).append(each.row.claim.task_id)
    delivered = _delivered(judged)
    version = batch.config.version if delivered else None
    touches.settle_batch(settlements, at=batch.locked_at, lease=LEASE, version=version)
    settlement.record_attempts(delivered)
    settlement.record_verdicts([(each.row.claim.task_id, each.verdict) for each in judged], batch.locked_at)
    failed = {each.row.claim.task_id: each.detail for each in judged if each.settlement.state in FAILED_ENDS}
    dead_letters.record_failed_touches(list(failed), details=failed)


def _delivered(judged: Sequence[Judged]) -> list[DeliveryResult]:
    """Return the results of the local channels, which are delivered by the commit itself."""
    return [(each.delivery, Delivered()) for each in judged if each.delivery and each.settlement.state == "delivered"]


def _send_now(judged: Sequence[Judged]) -> None:
    """Send the messages of the local channels, together for each channel."""
    alike: dict[Channel, list[Message]] = {}
    for delivery, _ in _delivered(judged):
        alike.setdefault(delivery.channel, []).append(delivery.message)
    for channel, messages in alike.items():
        channel.send_now(messages)  # type: ignore[attr-defined]


def _publish(wakeups: list[WakeUp], config: Snapshot) -> None:
    if wakeups:
        publish_touches(wakeups, {wakeup.route: config.nodes[wakeup.route].channel.id for wakeup in wakeups})


def _submit(judged: Sequence[Judged]) -> None:
    deliveries = [each.delivery for each in judged if each.delivery and each.settlement.state == "running"]
    if deliveries:
        sender().submit(deliveries)


def _list_local_notes(judged: Sequence[Judged], answers: PresenceAnswers) -> list[presence.SendingNote]:
    """Return the questions about events of presence providers, each with whether its touch is delivered.

    Stopped touches are reported if their last question was asked: for a channel without a call, or perhaps by a worker
    that was killed before the mark. A touch that was marked before may have been sent, so it is left out.
    """
    types = presence.provider_event_types()
    asked = [(each.row, each.settlement.state, answers.questions.get(each.row.claim.task_id)) for each in judged]
    return [
        (question, state == "delivered")
        for row, state, question in asked
        if question and question.event_type in types and state != "running"
        if state == "delivered" or (row.attempt == 0 and (question.about_to_send or row.claim.lease_no > 1))
    ]


def _log_unsent(judged: Sequence[Judged], config: Snapshot) -> None:
    """Log the touches that were not sent. The local channel or the sender logs the others."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in judged:
        if each.delivery:
            continue
        row, end = each.row, each.settlement
        if end.state in FAILED_ENDS:
            settlement.log_failed(row.claim.task_id, row.event.trace_id, end, node=config.nodes[row.node_id].key)
        else:
            alike[end.state, end.reason].append(tracing.trace_label(row.event.trace_id, row.claim.task_id))
    for (state, reason), names in alike.items():
        tracing.log_touches("touches_settled", names, state=state, reason=reason)


@metrics.never_raises
def _measure(judged: Sequence[Judged]) -> None:
    """Update the metrics, once per batch and after the commit."""
    settlement.measure_verdicts(each.verdict for each in judged)
    settlement.measure_ends(Counter((each.settlement.state, each.settlement.reason) for each in judged))
    settlement.measure_attempts(_delivered(judged))
