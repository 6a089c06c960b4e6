"""Judge the touches of a batch, and render and route those that will be sent. Changes no row."""

from __future__ import annotations

import time
from typing import NamedTuple

from scheduling.channels.base import Message, is_immediate
from scheduling.delivery import settlement
from scheduling.delivery.due_batch import DueBatch
from scheduling.delivery.outgoing import LEASE, Delivery
from scheduling.delivery.routing import NoTarget, Route, channel_of, target_for
from scheduling.ledger.touches import Due
from scheduling.ledger.transitions import Content, Settlement, WakeUp
from scheduling.policy import guards
from scheduling.policy.guards import Candidate, CapSlot, GuardVerdict
from scheduling.templating.rendering import choose_text, render_message
from scheduling.templating.values import CannotRender

LONGEST_JUDGING = 3.0  #: seconds per batch, during which its customers are locked


class Judged(NamedTuple):
    """A touch with its verdict and its next state."""

    row: Due
    verdict: GuardVerdict
    settlement: Settlement
    delivery: Delivery | None = None  #: present if the touch is sent
    detail: str = ""  #: why no message could be prepared


def judge_batch(batch: DueBatch) -> tuple[list[Judged], list[WakeUp]]:
    """Judge the most important touches first: the first one gets a free cap slot.

    Customers and touches are locked for at most `LONGEST_JUDGING` seconds. Touches not judged by then stay unchanged.
    They are returned as wake-ups for the next batch.
    """
    ends_at = time.monotonic() + LONGEST_JUDGING
    ordered = sorted(batch.due, key=lambda row: (row.priority, row.due_at))
    judged: list[Judged] = []
    for row in ordered:
        if judged and time.monotonic() > ends_at:
            left = ordered[len(judged) :]
            return judged, [WakeUp(row.claim.task_id, row.due_at, row.priority, row.node_id) for row in left]
        judged.append(_judge(batch, row))
    return judged, []


def _judge(batch: DueBatch, row: Due) -> Judged:
    candidate = batch.candidate(row)
    verdict = guards.judge_touch(candidate, batch.surroundings(row), batch.locked_at)
    if verdict.decision == guards.SEND:
        return _prepare_send(batch, row, candidate, verdict)
    return Judged(row, verdict, _without_attempt(batch, row, settlement.decision_for(verdict)))


def _prepare_send(batch: DueBatch, row: Due, candidate: Candidate, verdict: GuardVerdict) -> Judged:
    """Render the message and find its target before it takes a cap slot.

    A failure after that would use a slot that other touches need.
    """
    template, counts = candidate.template, candidate.node.guard_cap != "ignore"
    content = Content(template.content_type, template.id, template.version, counts)
    try:
        delivery = _build_delivery(batch, row, candidate)
    except (CannotRender, NoTarget) as error:
        reason = "template_data_missing" if isinstance(error, CannotRender) else error.reason
        failed = Settlement("failed", reason, releases_cap_slot=True, content=content)
        return Judged(row, verdict, _without_attempt(batch, row, failed), detail=str(error))
    immediate = is_immediate(delivery.channel)
    if immediate:
        delivery.sent_at = delivery.ended_at = batch.clock
    if not candidate.has_slot:
        until = None if immediate else batch.locked_at + LEASE
        slot = CapSlot(row.claim.task_id, batch.locked_at, template.content_type, counts, immediate, until)
        batch.history.add_slot(row, slot)
    return Judged(row, verdict, Settlement("delivered" if immediate else "running", content=content), delivery)


def _without_attempt(batch: DueBatch, row: Due, ended: Settlement) -> Settlement:
    return settlement.keep_outcome_unknown(ended) if row.claim.task_id in batch.history.with_unknown_outcome else ended


def _build_delivery(batch: DueBatch, row: Due, candidate: Candidate) -> Delivery:
    spec, event = candidate.node.channel, row.event
    route = batch.routes.get(row.claim.task_id)
    if route is None:
        channel = channel_of(spec)
        target = target_for(spec, channel, candidate.customer, event.chat_id, batch.communities, batch.disabled)
        route = Route(channel, target)
    subject, body, locale = _render(batch, row, candidate)
    message = Message(
        task_id=row.claim.task_id,
        delivery_key=row.root_id,
        user_id=event.user_id,
        chat_id=event.chat_id,
        node=candidate.node.key,
        content_type=candidate.template.content_type,
        category=candidate.template.category,
        subject=subject,
        body=body,
        locale=locale,
        event={"source": event.source, "id": event.event_id, "type": event.type, "time": event.occurred_at},
        repeatable=spec.idempotent,
        target=route.target,
        trace_id=event.trace_id,
    )
    return Delivery(
        row.claim, message, route.channel, spec, row.attempt + 1, batch.locked_at, row.expires_at, batch.clock,
        node_id=row.node_id,
        priority=row.priority,
        receiver=route.receiver,
        event_at=event.occurred_at if row.node_id in batch.config.asking_presence else None,
        question=batch.presence.questions.get(row.claim.task_id),
        with_unknown_outcome=row.claim.task_id in batch.history.with_unknown_outcome,
        late=(batch.locked_at - row.due_at).total_seconds(),
    )  # fmt: skip


def _render(batch: DueBatch, row: Due, candidate: Candidate) -> tuple[str, str, str]:
    """Return subject, body and locale.

    A retry under the same delivery key repeats the content of the first attempt. A receiver that honours the key may
    keep either message.
    """
    first = batch.history.first_attempts.get(row.claim.task_id)
    if first and first.body:
        return first.subject, first.body, choose_text(candidate.template, candidate.customer.locale).locale
    return render_message(candidate.template, candidate.customer, row.event)
