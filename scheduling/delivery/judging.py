"""Judge the touches of a batch, and render and route those that will be sent. Changes no row."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import NamedTuple

from scheduling.channels.base import Message, find_escape
from scheduling.delivery import settlement
from scheduling.delivery.due_batch import Due, DueBatch
from scheduling.delivery.links import tracks_links
from scheduling.delivery.outgoing import LEASE, Delivery
from scheduling.delivery.routing import NoTarget, Route, channel_of, target_for
from scheduling.ledger.transitions import Content, Settlement
from scheduling.policy import guards
from scheduling.policy.guards import Candidate, CapSlot, GuardVerdict
from scheduling.templating.library import CannotRender
from scheduling.templating.rendering import choose_text, render_message

LONGEST_JUDGING = 3.0  #: seconds per batch, during which its customers are locked


class Judged(NamedTuple):
    """A touch with its verdict and its next state."""

    row: Due
    verdict: GuardVerdict
    settlement: Settlement
    delivery: Delivery | None = None  #: present if the touch is sent
    detail: str = ""  #: why no message could be prepared


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
    return Judged(row, verdict, _without_attempt(batch, row, settlement.decision_for(verdict)))


def _prepare_send(batch: DueBatch, row: Due, candidate: Candidate, verdict: GuardVerdict) -> Judged:
    """Render the message and find its target before it takes a cap slot.

    A failure after that would use a slot that other touches need.
    """
    template, counts = candidate.template, candidate.node.guard_cap != "ignore"
    content = (template.content_type, template.id, template.version, counts)
    try:
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
    return Judged(row, verdict, _claim(*content), _build_delivery(batch, row, message, route, candidate))


@lru_cache(maxsize=1024)
def _claim(content_type: str, template_id: int, version: int, counts: bool) -> Settlement:
    """Return one object for all touches with the same content: they are compared when they are stored together."""
    return Settlement("running", content=Content(content_type, template_id, version, counts))


def _without_attempt(batch: DueBatch, row: Due, ended: Settlement) -> Settlement:
    return settlement.keep_outcome_unknown(ended) if row.task_id in batch.history.with_unknown_outcome else ended


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
    return Delivery(
        row.claim, message, route.channel, spec, row.attempt + 1, batch.locked_at, row.expires_at, batch.clock,
        node_id=row.node_id,
        priority=row.priority,
        receiver=route.receiver,
        tracks_links=tracks_links(candidate.template, route.channel),
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
    return render_message(candidate.template, candidate.customer, row.event, find_escape(route.channel))
